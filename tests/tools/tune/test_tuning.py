"""Tuning: resuming, what each method changes, and what is written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.sar_config import read_acceptance, read_sar_config
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.tools.tune import batches
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob, TuningOutcome
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuned_checkpoint import _cast
from spaceport.tools.tune.tuning import tune
from support.paths import TINY

pytestmark = pytest.mark.slow

MASK, TEXT_TOKENS = 4, 628  # the tiny checkpoint's mask token, and the size of its tokenizer
COLOURS = (("Red", "fire"), ("Green", "grass"), ("Blue", "the sea"), ("Gold", "the sun"))
SETTINGS = TrainingSettings(
    "both",
    batch_size=4,
    micro_batch_size=4,
    max_steps=6,
    epochs=9,
    learning_rate=1e-3,
    anchors=4,
    mask_slots=3,
    cutoff=160,
)

Weights = dict[str, Tensor]


def colours(first: int) -> str:
    items = [COLOURS[(first + number) % len(COLOURS)] for number in range(3)]
    return "Three:\n\n" + "\n".join(f"{n}. {name}: the colour of {of}" for n, (name, of) in enumerate(items, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    """Forking lists, chats and plain texts."""
    lines: list[dict[str, Any]] = []
    for number in range(4):
        turns = [("user", f"Hello {number}"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Bye then.")]
        lines.append({"messages": [{"role": role, "content": content} for role, content in turns]})
        lines.append({"prompt": f"Which {number}?", "response": colours(number)})
        lines.append({"text": f"import json\n\nanswer = {number}\n"})
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def job(data: Path, target: Path, settings: TrainingSettings = SETTINGS, **options: Any) -> TuningJob:
    return replace(TuningJob(TINY, target, (data,), settings, log_every=2, save_every=3), **options)


@pytest.fixture(scope="module")
def whole(data: Path, folder: Path) -> TuningOutcome:
    """An uninterrupted tuning, in the folder `whole`."""
    return tune(job(data, folder / "whole", validation=(data,)))


def weights(checkpoint: Path) -> Weights:
    return load_file(checkpoint / "model.safetensors")


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def measurements(checkpoint: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl without timing values."""
    lines = [json.loads(line) for line in (checkpoint / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def stopping(after: int) -> TrainingCallbacks:
    """Callbacks that stop a training after `after` steps."""
    done: list[object] = []
    return TrainingCallbacks(on_step=done.append, should_stop=lambda: len(done) == after)


# Resuming


@pytest.mark.parametrize("steps", [(1,), (3,), (1, 1, 3)])
def test_a_resumed_training_equals_an_uninterrupted_one(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path, steps: tuple[int, ...]
) -> None:
    order = job(data, tmp_path / "tuned", validation=(data,))
    for number, after in enumerate(steps):
        with pytest.raises(KeyboardInterrupt):
            tune(replace(order, resume=number > 0), stopping(after))
        assert not order.target.exists()
        assert [path.name for path in sorted((tmp_path / "tuned.training").glob("step-*"))] == [
            f"step-{sum(steps[: number + 1]):08d}"
        ]
    resumed = tune(replace(order, resume=True))
    assert same(weights(order.target), weights(folder / "whole"))
    assert measurements(order.target) == measurements(folder / "whole")
    assert resumed.counts == whole.counts
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def as_schema_1(state: Path) -> None:
    """Rewrite a saved training state with the keys of schema 1, which had no schema number."""
    settings = json.loads((state / "settings.json").read_text())
    del settings["schema"]
    for old, new in (("batch", "batch_size"), ("micro_batch", "micro_batch_size"), ("rate", "learning_rate")):
        settings["settings"][old] = settings["settings"].pop(new)
    settings["settings"]["whole_rate"] = settings["settings"].pop("unfork_rate")
    (state / "settings.json").write_text(json.dumps(settings))
    (last,) = state.glob("step-*")
    progress = json.loads((last / "progress.json").read_text())
    progress["unmeasured"] = progress.pop("pending_sums")
    (last / "place.json").write_text(json.dumps(progress))
    (last / "progress.json").unlink()


def test_a_state_of_schema_1_is_resumed_and_an_unknown_schema_refused(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path
) -> None:
    order = job(data, tmp_path / "tuned", validation=(data,))
    with pytest.raises(KeyboardInterrupt):
        tune(order, stopping(1))
    state = tmp_path / "tuned.training"
    as_schema_1(state)
    settings = (state / "settings.json").read_text()
    (state / "settings.json").write_text(json.dumps({**json.loads(settings), "schema": 3}))
    with pytest.raises(InputFault, match=r"training state has schema 3: expected 2 or 1; resume with the version"):
        tune(replace(order, resume=True))
    (state / "settings.json").write_text(settings)
    tune(replace(order, resume=True))
    assert same(weights(order.target), weights(folder / "whole"))


@pytest.mark.parametrize("method", ["lora", "gated-lora", "embeddings"])
def test_other_methods_can_be_resumed(data: Path, tmp_path: Path, method: Any) -> None:
    settings = replace(SETTINGS, method=method, objective="sar", max_steps=3, rank=2)
    tune(job(data, tmp_path / "whole", settings))
    with pytest.raises(KeyboardInterrupt):
        tune(job(data, tmp_path / "tuned", settings), stopping(1))
    tune(job(data, tmp_path / "tuned", settings, resume=True))
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert same(load_file(file), load_file(tmp_path / "tuned" / file.name))


def test_a_stop_at_a_saved_step_ends_the_training(data: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(job(data, tmp_path / "tuned", save_every=1), stopping(2))
    assert (tmp_path / "tuned.training" / "step-00000002").exists()
    assert not (tmp_path / "tuned.training" / "step-00000003").exists()


def test_a_truncated_metrics_line_is_measured_again(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path
) -> None:
    order = job(data, tmp_path / "tuned", validation=(data,))
    with pytest.raises(KeyboardInterrupt):
        tune(order, stopping(3))
    with (tmp_path / "tuned.training" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "training", "step": 4, "lo')
    tune(replace(order, resume=True))
    assert measurements(order.target) == measurements(folder / "whole")


def rows_of(
    data: Path, target: Path, monkeypatch: pytest.MonkeyPatch, settings: TrainingSettings, **options: Any
) -> list[bytes]:
    """The rows of each training step."""
    seen: list[bytes] = []
    ask = batches.TrainingBatches.rows

    def rows(self: batches.TrainingBatches, step: int) -> Any:
        found = ask(self, step)
        seen.append(b"|".join(row.ids.tobytes() + row.parents.tobytes() + row.targets.tobytes() for row in found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(batches.TrainingBatches, "rows", rows)
        tune(job(data, target, settings, **options))
    return seen


def test_rows_follow_the_seed_and_anchors_are_resampled(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, max_steps=4, batch_size=100)
    first, again, other = (
        rows_of(data, tmp_path / f"{number}", monkeypatch, replace(settings, seed=seed))
        for number, seed in enumerate((0, 0, 1))
    )
    assert first == again
    assert len({*first, *other}) == 8  # each epoch is one step, and no two of them have the same anchors


def test_samples_are_reshuffled_every_epoch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, objective="apar", max_steps=12, unfork_rate=0.0)
    steps = rows_of(data, tmp_path / "tuned", monkeypatch, settings)
    epochs = [steps[first : first + 3] for first in range(0, 12, 3)]
    assert len({frozenset(epoch) for epoch in epochs}) > 1  # other samples share a step
    assert len({b"".join(sorted(b"|".join(epoch).split(b"|"))) for epoch in epochs}) == 1  # all of them, in each epoch


def test_the_learning_rate_has_linear_warmup_and_cosine_decay(data: Path, tmp_path: Path) -> None:
    rates: list[float] = []
    callbacks = TrainingCallbacks(on_step=lambda training: rates.append(training._optimizer.param_groups[0]["lr"]))
    outcome = tune(
        job(data, tmp_path / "tuned", replace(SETTINGS, max_steps=6, learning_rate=1.0e-3, warmup=1 / 3)), callbacks
    )
    expected = [5e-4, 1e-3, *(5e-4 * (1 + math.cos(math.pi * share / 4)) for share in range(4))]
    assert rates == pytest.approx(expected)
    last = outcome.last("training")
    assert last is not None
    assert last["learning_rate"] == pytest.approx(0)


# What each method changes


def test_method_embeddings_changes_only_new_token_embeddings(data: Path, tmp_path: Path) -> None:
    tune(job(data, tmp_path / "tuned", replace(SETTINGS, method="embeddings", weight_decay=0.1)))
    before, after = weights(TINY), weights(tmp_path / "tuned")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.embed_tokens.weight"}
    (name,) = changed
    rows = (before[name] != after[name]).any(1).nonzero().flatten().tolist()
    assert rows == [MASK, TEXT_TOKENS, TEXT_TOKENS + 1]


def test_low_rank_adapters_are_merged_into_plain_weights(data: Path, tmp_path: Path) -> None:
    tune(job(data, tmp_path / "tuned", replace(SETTINGS, method="lora", rank=2, targets=("q_proj", "down_proj"))))
    before, after = weights(TINY), weights(tmp_path / "tuned")
    assert after.keys() == before.keys()
    changed = {name.split(".")[-2] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"q_proj", "down_proj", "embed_tokens"}
    for name in after:
        if "q_proj" in name or "down_proj" in name:
            change = after[name].float() - before[name].float()
            assert torch.linalg.svdvals(change)[2:].max() < 5e-3 < torch.linalg.svdvals(change)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert type(model).__name__ == "LlamaForCausalLM"


def logits_of(bundle: Path, ids: list[int]) -> Any:
    """Logits of a token sequence, computed in one step."""
    engine = open_engine(open_bundle(bundle), "onnxruntime", EngineOptions(64, 1))
    count = len(ids)
    visible = np.zeros((1, 1, count, visible_length(64)), np.bool_)
    visible[0, 0, :, :count] = np.tri(count, dtype=np.bool_)
    indices = np.arange(count)[None]
    return engine.run(Batch(0, np.array([ids]), indices, indices, visible, indices, visible))[0].copy()


@pytest.mark.nightly
def test_gated_adapters_leave_ordinary_rows_bit_identical_after_export(
    tiny_bundle: Path, data: Path, tmp_path: Path
) -> None:
    tune(job(data, tmp_path / "tuned", replace(SETTINGS, objective="sar", method="gated-lora", rank=2)))
    before, after = weights(TINY), weights(tmp_path / "tuned")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        kept = torch.ones(len(tensor), dtype=torch.bool)
        if "embed_tokens" in name:
            kept[MASK] = False
        assert torch.equal(after[name][kept], tensor[kept])
    export(tmp_path / "tuned", tmp_path / "bundle", ExportOptions())
    ids = [0, 30, 31, 32, 33, 34, MASK, MASK]
    base, tuned = logits_of(tiny_bundle, ids), logits_of(tmp_path / "bundle", ids)
    others = [token for token in range(base.shape[1]) if token != MASK]
    assert np.array_equal(base[:6, others], tuned[:6, others])
    assert (np.abs(base[6:] - tuned[6:]).max(-1) > 0.01).all()


# What is written


def test_a_tuned_checkpoint_can_be_exported(whole: TuningOutcome, folder: Path, tmp_path: Path) -> None:
    tuned = folder / "whole"
    entries = json.loads((tuned / "sar_config.json").read_text())
    (measured,) = read_acceptance(tuned)
    assert entries.pop("acceptance") == [json.loads(json.dumps(asdict(measured)))]
    assert entries == {
        "mask_tokens": ["[M]"],
        "mask_slots": 3,
        "fork_token": "[Fork]",
        "child_token": "[Child]",
        "method": "tune",
    }
    assert {tensor.dtype for tensor in weights(tuned).values()} == {torch.float16}
    assert json.loads((tuned / "config.json").read_text())["dtype"] == "float16"
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tuned / name).read_bytes() == (TINY / name).read_bytes()
    export(tuned, tmp_path / "bundle", ExportOptions())
    with Runtime.open(tmp_path / "bundle", max_seq_len=128) as runtime:
        plain = runtime.generate("import json", Decoding(max_tokens=12, mask_slots=0))
        drafted = runtime.generate("import json", Decoding(max_tokens=12, mask_slots=3))
    assert plain.tokens == drafted.tokens


def test_the_rates_of_the_last_validation_are_stored_and_exported(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path
) -> None:
    (measured,) = read_acceptance(folder / "whole")
    last = whole.last("validation")
    assert last is not None
    assert measured.rates == tuple(round(rate, 4) for rate in accumulate(last["acceptance"], min))
    assert len(measured.rates) == SETTINGS.mask_slots
    assert 0 < measured.rates[0] == round(last["accuracies"][1], 4)
    assert all(rate <= accuracy for rate, accuracy in zip(last["acceptance"], last["accuracies"][1:], strict=True))
    assert (measured.data, measured.lookup, measured.temperature) == ("validation data data.jsonl", (), 0.0)
    assert measured.tokens > 0
    assert export(folder / "whole", tmp_path / "bundle", ExportOptions()).acceptance == (measured,)
    tune(job(data, tmp_path / "unmeasured", replace(SETTINGS, max_steps=1)))
    assert read_acceptance(tmp_path / "unmeasured") == ()


def test_the_card_lists_data_settings_and_curves(whole: TuningOutcome, folder: Path) -> None:
    card = (folder / "whole" / "README.md").read_text("utf-8")
    for line in (
        "# tiny, tuned with spaceport",
        "| data.jsonl |",
        "| forked | 4 |",
        "| unforked | 8 |",
        "| steps | 6 |",
    ):
        assert f"\n{line}\n" in f"\n{card}"
    assert "| objective | both |" in card
    last = whole.last("validation")
    assert last is not None
    assert f"| validation: loss | {' | '.join(f'{loss:.3f}' for loss in last['losses'])} |" in card
    assert "![curves](training.svg)" in card
    drawing = (folder / "whole" / "training.svg").read_text("utf-8")
    assert all(f">{name}<" in drawing for name in ("next token", "mask slot 3", "next token, validation"))
    assert ">mask slot 4<" not in drawing


def test_metrics_have_one_line_per_measurement(whole: TuningOutcome, folder: Path) -> None:
    lines = measurements(folder / "whole")
    assert [(line["step"], line["kind"]) for line in lines] == [
        (2, "training"),
        (3, "validation"),
        (4, "training"),
        (6, "training"),
        (6, "validation"),
    ]
    for line in lines:
        assert line["steps"] == 6
        assert len(line["losses"]) == len(line["accuracies"]) == 4
        assert line["epoch"] == line["step"] / 3
    assert lines[-1]["losses"][0] < lines[1]["losses"][0]


def test_existing_special_tokens_keep_their_embeddings(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path
) -> None:
    tuned = folder / "whole"
    order = job(
        data,
        tmp_path / "again",
        replace(SETTINGS, objective="apar", method="embeddings", max_steps=1, learning_rate=1e-9),
    )
    tune(replace(order, checkpoint=tuned))
    config = read_sar_config(tuned)
    assert config.pop("acceptance")  # of other weights
    assert read_sar_config(order.target) == config
    assert (order.target / "tokenizer.json").read_bytes() == (tuned / "tokenizer.json").read_bytes()
    assert same(weights(order.target), weights(tuned))


def test_distinct_adds_one_mask_token_per_slot(data: Path, tmp_path: Path) -> None:
    tune(
        job(
            data, tmp_path / "tuned", replace(SETTINGS, objective="sar", distinct=True, max_steps=1, learning_rate=1e-9)
        )
    )
    config = json.loads((tmp_path / "tuned" / "sar_config.json").read_text())
    assert (config["mask_tokens"], config["fork_token"]) == (["[M1]", "[M2]", "[M3]"], None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert tokenizer.convert_tokens_to_ids(config["mask_tokens"]) == [TEXT_TOKENS, TEXT_TOKENS + 1, TEXT_TOKENS + 2]
    rows, old = weights(tmp_path / "tuned")["model.embed_tokens.weight"], weights(TINY)["model.embed_tokens.weight"]
    mean = old[:TEXT_TOKENS].float().mean(0).half()
    assert all(torch.equal(row, mean) for row in rows[TEXT_TOKENS : TEXT_TOKENS + 3])
    again = tmp_path / "again"
    tune(
        replace(
            job(data, again, replace(SETTINGS, objective="sar", distinct=True, max_steps=1)),
            checkpoint=tmp_path / "tuned",
        )
    )
    assert json.loads((again / "sar_config.json").read_text()) == config


def test_tied_weights_stay_tied_after_a_cast() -> None:
    one = torch.ones(2, 3)
    found = _cast({"a": one, "b": one, "c": torch.ones(2, 3)}, torch.float16)
    assert found["a"] is found["b"] is not found["c"]
    assert found["c"].dtype == torch.float16


# How it is computed


@pytest.mark.parametrize("change", ["micro_batch", "recompute"])
def test_micro_batches_and_checkpointing_change_no_weight(
    whole: TuningOutcome, data: Path, folder: Path, tmp_path: Path, change: str
) -> None:
    as_float32 = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.py", "*.md"))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.save_pretrained(as_float32)
    order = replace(
        job(data, tmp_path / "plain", replace(SETTINGS, max_steps=2, learning_rate=1e-4)), checkpoint=as_float32
    )
    tune(order)
    if change == "micro_batch":
        other = replace(order, settings=replace(order.settings, micro_batch_size=1))
    else:
        other = replace(order, recompute=True)
    tune(replace(other, target=tmp_path / "other"))
    one, two = weights(tmp_path / "plain"), weights(tmp_path / "other")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6


@pytest.fixture
def fresh_accelerator() -> Iterator[Callable[[], None]]:
    """Reset accelerate's process-wide precision, so that a test can choose one."""

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)

    forget()
    yield forget
    forget()


def test_bfloat16_training_reduces_the_loss(data: Path, tmp_path: Path, fresh_accelerator: Callable[[], None]) -> None:
    outcome = tune(job(data, tmp_path / "tuned", replace(SETTINGS, max_steps=20), bf16=True, log_every=10))
    first, last = outcome.measurements[0], outcome.measurements[-1]
    assert last["losses"][0] < first["losses"][0]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "tuned").values())
