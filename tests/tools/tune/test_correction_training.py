"""Training of the draft correction: beside an adapter or all weights, what it gains, and its way into a bundle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.correction_factors import FACTORS_FILE, read_factors, write_factors
from spaceport.exporter.input_rows_file import write_input_rows
from spaceport.exporter.sar_config import read_sar_config, write_sar_config
from spaceport.graphs.contract.draft_correction import CORRECTION_FILE, read_tables
from spaceport.graphs.correction import Factors
from spaceport.graphs.input_rows import InputRows
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
from support.exported import bundle_of
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


class Corrections:
    """Trainings with a draft correction, and those that several tests read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        lines = [{"prompt": f"Which {number}?", "response": "Red or green, and then blue."} for number in range(4)]
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self.short = cache(lambda: self.trained("short"))
        self.long = cache(
            lambda: self.trained("long", replace(SETTINGS, max_steps=60, learning_rate=0.03, epochs=60), validate=True)
        )

    def trained(
        self,
        name: str,
        settings: TrainingSettings = SETTINGS,
        callbacks: TrainingCallbacks | None = None,
        validate: bool = False,
        **more: Any,
    ) -> Path:
        validation = (self.data,) if validate else ()
        only = settings.method == "gated-lora"
        job = TuningJob(TINY, self.folder / name, (self.data,), settings, validation=validation, adapter_only=only)
        tune(replace(job, **more), callbacks)
        return job.target


@pytest.fixture(scope="module")
def corrections(tmp_path_factory: pytest.TempPathFactory) -> Corrections:
    return Corrections(tmp_path_factory.mktemp("corrections"))


def factors(folder: Path) -> Factors:
    found = read_factors(folder)
    assert found is not None
    return found


def test_a_correction_and_input_rows_go_with_their_checkpoint_into_the_bundle(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, fork = 96, 630  # an unused row of the table: no text has this token
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.py", "*.md", "__*"))
    given = Factors(*(torch.randn(hidden, 4, generator=random) for _ in range(2)))
    write_factors(checkpoint, given)
    bundles = []
    for sign in (1, -1):
        write_input_rows(checkpoint, InputRows((fork,), sign * torch.ones(1, hidden)))
        write_sar_config(checkpoint, {**read_sar_config(checkpoint), "fork_by_default": sign < 0})
        bundles.append(bundle_of(checkpoint))
    scores = []
    for bundle, by_default in zip(bundles, (False, True), strict=True):
        with Runtime.open(bundle, max_seq_len=100) as runtime:
            scores.append(runtime.score([5, fork, 7, 8]).logprobs)
            assert runtime.bundle.manifest.fork_by_default == by_default
            table = (bundle / CORRECTION_FILE, runtime.bundle.manifest.signature.vocab_size)
    assert scores[0][0] == scores[1][0]
    assert scores[0][1] != scores[1][1]  # read from its input row
    embeddings = load_file(TINY / "model.safetensors")["model.embed_tokens.weight"].float()
    with table[0].open("rb") as file:
        for found, expected in zip(read_tables(file, table[1]), factors(checkpoint).tables(embeddings), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)


def test_acceptance_is_measured_along_corrected_drafts_which_change_no_text(corrections: Corrections) -> None:
    folder = corrections.long()
    line = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert (line["kind"], len(line["corrected"])) == ("validation", 3)
    assert sum(line["corrected"]) > sum(line["accuracies"][1:])
    assert "| validation: accuracy with the draft correction | - |" in (folder / "README.md").read_text()
    decoding = Decoding(max_tokens=48, mask_slots=3, draft="chain")
    with checkpoint_runtime(open_checkpoint(TINY, TokenFlags(), adapter=folder), 128) as runtime:
        prompts = [runtime.tokens_of(f"User: Which {number}?\n") for number in range(3)]
        drafted = [runtime.generate(ids, decoding) for ids in prompts]
        assert [each.tokens for each in drafted] == [
            runtime.generate(ids, Decoding(max_tokens=48, mask_slots=0, lookup=0)).tokens for ids in prompts
        ]
        steps = sum(each.statistics.steps for each in drafted)
        measured = measure(runtime, [ReferenceAnswer(1, tuple(ids), ()) for ids in prompts], 48, 3).generated
        assert measured.steps[3] == steps
        uncorrected = Tally(3)
        for ids in prompts:
            (thread,) = generate_answer(runtime, ids, 48, 3).threads
            segment = Segment(thread.prefix, thread.tokens)
            predicted = predict_segment(runtime.engine, runtime.bundle.manifest.tokens, segment, 3)
            uncorrected.add(predicted, thread.tokens, thread.ending == "end")
        assert uncorrected.steps[3] > steps


def test_a_correction_does_not_change_how_the_adapter_is_trained_from_its_first_step(corrections: Corrections) -> None:
    """Its loss has no gradient for the adapter; only the limit on the gradients' norm is shared."""
    loose = replace(SETTINGS, clip=1e9)
    one = corrections.trained("one", loose)
    two = corrections.trained("two", replace(loose, correction_rank=0))
    own, other = (load_file(folder / ADAPTER_FILE) for folder in (one, two))
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())
    assert not (two / FACTORS_FILE).exists()


def test_a_correction_is_trained_further_with_its_adapter(corrections: Corrections) -> None:
    first = corrections.short()
    assert factors(first).rank == 4
    assert factors(first).after.abs().max() > 0  # it begins with zeros
    still = replace(SETTINGS, learning_rate=1e-12, max_steps=1, correction_rank=0)
    same = corrections.trained("same", still, adapter=first)
    for found, expected in zip(factors(same), factors(first), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["full", pytest.param("embeddings", marks=pytest.mark.nightly)])
def test_every_method_can_train_a_correction(corrections: Corrections, method: Any) -> None:
    tuned = corrections.trained(method, replace(SETTINGS, method=method))
    assert factors(tuned).after.abs().max() > 0
    assert open_checkpoint(tuned, TokenFlags()).correction is not None


def test_a_resumed_training_has_the_correction_of_an_uninterrupted_one(corrections: Corrections) -> None:
    whole = corrections.trained("whole", bf16=True)
    stop = TrainingCallbacks(should_stop=iter([False, False, True]).__next__)
    with pytest.raises(KeyboardInterrupt):
        corrections.trained("resumed", bf16=True, callbacks=stop)
    resumed = corrections.trained("resumed", bf16=True, resume=True)
    for name in (FACTORS_FILE, ADAPTER_FILE):
        found, expected = load_file(resumed / name), load_file(whole / name)
        assert all(torch.equal(tensor, found[each]) for each, tensor in expected.items())
