"""Training of the draft correction: beside an adapter or all weights, further training, and its way into a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.correction_factors import FACTORS_FILE, read_factors
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.draft_correction import CORRECTION_FILE, read_tables
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuning import tune
from spaceport.tools.verify.acceptance.answers import generate_answer
from spaceport.tools.verify.acceptance.measure import measure
from spaceport.tools.verify.acceptance.predictions import predict_segment
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, Segment
from spaceport.tools.verify.acceptance.tally import Tally
from support.paths import TINY

pytestmark = pytest.mark.slow

SETTINGS = TrainingSettings(
    method="gated-lora",
    batch_size=2,
    max_steps=8,
    epochs=9,
    anchors=8,
    mask_slots=3,
    rank=2,
    cutoff=160,
    warmup=0.0,
    learning_rate=0.01,
    correction_rank=4,
)
Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    lines = [{"prompt": f"Which {number}?", "response": "Red or green, and then blue."} for number in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")

    def trained(
        name: str, settings: TrainingSettings = SETTINGS, callbacks: TrainingCallbacks | None = None, **more: object
    ) -> Path:
        only = settings.method == "gated-lora"
        target = tmp_path / name
        job = TuningJob(TINY, target, (data,), settings, adapter_only=only, validation=(data,), **more)  # type: ignore[arg-type]
        tune(job, callbacks)
        return target

    return trained


def test_a_correction_goes_with_its_adapter_into_the_bundle(train: Train, tmp_path: Path) -> None:
    folder = train("adapter")
    factors = read_factors(folder)
    assert factors is not None
    assert factors.rank == 4
    assert factors.after.abs().max() > 0  # it begins with zeros
    manifest = export(TINY, tmp_path / "bundle", ExportOptions(adapter=folder))
    assert CORRECTION_FILE in manifest.files
    model = load_model(open_checkpoint(TINY, TokenFlags(), adapter=folder), "float32")
    expected = factors.tables(model.get_input_embeddings().weight)  # type: ignore[operator]
    with (tmp_path / "bundle" / CORRECTION_FILE).open("rb") as file:
        found = read_tables(file, manifest.signature.vocab_size)
    for table, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(table, other, rtol=2e-3, atol=1e-6)


@pytest.mark.nightly
def test_a_correction_changes_drafts_and_no_text(train: Train, tmp_path: Path) -> None:
    folder = train("adapter", replace(SETTINGS, max_steps=60, learning_rate=0.03, epochs=60))
    export(TINY, tmp_path / "with", ExportOptions(adapter=folder))
    (folder / FACTORS_FILE).unlink()
    export(TINY, tmp_path / "without", ExportOptions(adapter=folder))
    prompts = [f"User: Which {number}?\n" for number in range(6)]
    found = {}
    for name, mask_slots in (("with", 3), ("without", 3), ("without", 0)):
        with Runtime.open(tmp_path / name, max_seq_len=128, step_costs="free") as runtime:
            decoding = Decoding(max_tokens=48, mask_slots=mask_slots, lookup=0, draft_siblings=1, fork=False)
            completions = [runtime.generate(prompt, decoding) for prompt in prompts]
        found[name, mask_slots] = (
            [each.tokens for each in completions],
            sum(each.statistics.steps for each in completions),
        )
    plain, _ = found["without", 0]
    assert plain == found["without", 3][0] == found["with", 3][0]
    assert found["with", 3][1] < found["without", 3][1]


def test_the_measurements_show_what_the_correction_gains(train: Train) -> None:
    folder = train("adapter", replace(SETTINGS, max_steps=60, learning_rate=0.03, epochs=60))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "validation"][-1]
    assert len(last["corrected"]) == 3
    assert sum(last["corrected"]) > sum(last["accuracies"][1:])
    assert "| validation: accuracy with the draft correction | - |" in (folder / "README.md").read_text()


def test_acceptance_is_measured_along_corrected_drafts(train: Train, tmp_path: Path) -> None:
    folder = train("adapter", replace(SETTINGS, max_steps=60, learning_rate=0.03, epochs=60))
    export(TINY, tmp_path / "bundle", ExportOptions(adapter=folder))
    decoding = Decoding(max_tokens=48, mask_slots=3, draft="chain")
    found = []
    for opened in (
        checkpoint_runtime(open_checkpoint(TINY, TokenFlags(), adapter=folder), 128),
        Runtime.open(tmp_path / "bundle", max_seq_len=128, threads=1),
    ):
        with opened as runtime:
            prompts = [runtime.tokens_of(f"User: Which {number}?\n") for number in range(6)]
            generated = measure(runtime, [ReferenceAnswer(1, tuple(ids), ()) for ids in prompts], 48, 3).generated
            steps = sum(runtime.generate(ids, decoding).statistics.steps for ids in prompts)
            assert generated.steps[3] == steps
            found.append(generated)
            uncorrected = Tally(3)
            for ids in prompts:
                (thread,) = generate_answer(runtime, ids, 48, 3).threads
                segment = Segment(thread.prefix, thread.tokens)
                predicted = predict_segment(runtime.engine, runtime.bundle.manifest.tokens, segment, 3)
                uncorrected.add(predicted, thread.tokens, thread.ending == "end")
            assert uncorrected.steps[3] > steps
    assert found[0] == found[1]


def test_a_correction_does_not_change_how_the_adapter_is_trained_from_its_first_step(train: Train) -> None:
    """Its loss has no gradient for the adapter; only the limit on the gradients' norm is shared."""
    loose = replace(SETTINGS, clip=1e9)
    one, two = train("one", loose), train("two", replace(loose, correction_rank=0))
    own, other = (load_file(folder / ADAPTER_FILE) for folder in (one, two))
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())
    assert not (two / FACTORS_FILE).exists()


def test_a_correction_is_trained_further_with_its_adapter(train: Train) -> None:
    first = train("first")
    still = replace(SETTINGS, learning_rate=1e-12, max_steps=1, correction_rank=0)
    same, before = read_factors(train("same", still, adapter=first)), read_factors(first)
    assert same is not None
    assert before is not None
    for found, expected in zip(same, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)
    with pytest.raises(
        OptionFault, match="--correction-rank is 8, the draft correction that is trained further has rank 4"
    ):
        train("other", replace(SETTINGS, correction_rank=8), adapter=first)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["full", "embeddings"])
def test_every_method_can_train_a_correction(train: Train, tmp_path: Path, method: str) -> None:
    folder = train("tuned", replace(SETTINGS, method=method))
    assert read_factors(folder) is not None
    assert CORRECTION_FILE in export(folder, tmp_path / "bundle", ExportOptions()).files


def test_a_resumed_training_has_the_correction_of_an_uninterrupted_one(train: Train) -> None:
    whole = train("whole", bf16=True)
    stop = TrainingCallbacks(should_stop=iter([False, False, True]).__next__)
    with pytest.raises(KeyboardInterrupt):
        train("resumed", bf16=True, callbacks=stop)
    resumed = train("resumed", bf16=True, resume=True)
    for name in (FACTORS_FILE, ADAPTER_FILE):
        found, expected = load_file(resumed / name), load_file(whole / name)
        assert all(torch.equal(tensor, found[each]) for each, tensor in expected.items())
