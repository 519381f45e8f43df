"""Tuning: resuming, what each method changes, and what is written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.mechanisms import read_mechanisms
from spaceport.exporter.sar_config import read_sar_config
from spaceport.graphs.phrases import Phrases
from spaceport.runtime.decoding import Decoding
from spaceport.training.job import TuningJob, TuningOutcome
from spaceport.training.settings import TrainingSettings
from spaceport.training.training import Training
from spaceport.training.tuned_checkpoint import _cast, _wide_enough
from spaceport.training.tuning import train
from spaceport.verify.reference import checkpoint_runtime
from support.paths import TINY
from support.tunings import after_each_step, float32_tiny, stopped

pytestmark = pytest.mark.slow

MASK, TEXT_TOKENS = 4, 628  # the tiny checkpoint's mask token, and the size of its tokenizer
LIST = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of {}"
SETTINGS = TrainingSettings(
    "both", batch_size=4, max_steps=6, epochs=9, learning_rate=1e-3, warmup=1 / 3, anchors=4, mask_slots=3, cutoff=160
)
METHODS = {"lora": {"rank": 2, "targets": ("q_proj", "down_proj")}, "embeddings": {"weight_decay": 0.1}}


@dataclass
class Tunings:
    """Tunings on one file of forking lists, chats and plain texts, and those that several tests read."""

    folder: Path
    rates: list[float] = field(default_factory=list)  # learning rate of each step of `whole`

    def __post_init__(self) -> None:
        lines: list[dict[str, Any]] = []
        for number in range(4):
            turns = [("user", f"Hello {number}"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Bye then.")]
            lines.append({"messages": [{"role": role, "content": content} for role, content in turns]})
            lines.append(
                {"prompt": f"Which {number}?", "response": LIST.format(("the sea", "ice", "ink", "jeans")[number])}
            )
            lines.append({"text": f"import json\n\nanswer = {number}\n"})
        self.data = self.folder / "data.jsonl"
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self.whole = self.folder / "whole"
        self.outcome = cache(self._train_whole)
        self.by_method = cache(self._train_method)

    def job(self, target: Path, settings: TrainingSettings = SETTINGS, **options: Any) -> TuningJob:
        return replace(TuningJob(TINY, target, (self.data,), settings, log_every=2, save_every=3), **options)

    def validated(self, target: Path) -> TuningJob:
        return self.job(target, validation=(self.data,))

    def _train_whole(self) -> TuningOutcome:
        def note(training: Training) -> None:
            self.rates.append(training._optimizer.param_groups[0]["lr"])

        with after_each_step(note):
            return train(self.validated(self.whole))

    def of_method(self, target: Path, method: str, **options: Any) -> TuningJob:
        settings: Any = {**METHODS[method], "method": method, "max_steps": 4}
        return self.job(target, replace(SETTINGS, **settings), **options)

    def _train_method(self, method: str) -> Path:
        train(self.of_method(self.folder / method, method))
        return self.folder / method


@pytest.fixture(scope="module")
def tunings(tmp_path_factory: pytest.TempPathFactory) -> Tunings:
    return Tunings(tmp_path_factory.mktemp("tuning"))


@pytest.fixture(scope="module")
def whole(tunings: Tunings) -> TuningOutcome:
    """An uninterrupted tuning, in the folder `tunings.whole`."""
    return tunings.outcome()


def weights(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that differ."""
    assert one.keys() == other.keys()
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}


def measurements(checkpoint: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl without timing values."""
    lines = [json.loads(line) for line in (checkpoint / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


# Resuming


@pytest.mark.parametrize("steps", [(3,), (1, 1, 3)])
def test_a_resumed_training_equals_an_uninterrupted_one(
    whole: TuningOutcome, tunings: Tunings, tmp_path: Path, steps: tuple[int, ...]
) -> None:
    job = tunings.validated(tmp_path / "tuned")
    for number, after in enumerate(steps, 1):
        state = stopped(replace(job, resume=number > 1), after)
        assert not job.target.exists()
        assert max(path.name for path in state.glob("step-*")) == f"step-{sum(steps[:number]):08d}"
        assert len(list(state.glob("step-*"))) <= 2
    with (state / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "training", "step": 5, "lo')  # truncated: it is measured again
    resumed = train(replace(job, resume=True))
    assert not changed(weights(job.target), weights(tunings.whole))
    found, expected = (
        [(line["step"], line["kind"], line["tokens"]) for line in measurements(folder)]
        for folder in (job.target, tunings.whole)
    )
    assert found == expected
    assert resumed.counts == whole.counts
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


# What each method changes


def test_method_embeddings_changes_only_new_token_embeddings(tunings: Tunings) -> None:
    before, after = weights(TINY), weights(tunings.by_method("embeddings"))
    assert changed(before, after) == {"model.embed_tokens.weight"}
    rows = before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]
    assert rows.any(1).nonzero().flatten().tolist() == [MASK, TEXT_TOKENS, TEXT_TOKENS + 1]
    mean = before["model.embed_tokens.weight"][:TEXT_TOKENS].float().mean(0).half()  # new rows begin so
    assert (after["model.embed_tokens.weight"][TEXT_TOKENS : TEXT_TOKENS + 2] != mean).any(1).all()


def test_low_rank_adapters_are_merged_into_plain_weights(tunings: Tunings) -> None:
    tuned = tunings.by_method("lora")
    before, after = weights(TINY), weights(tuned)
    assert {name.split(".")[-2] for name in changed(before, after)} == {"q_proj", "down_proj", "embed_tokens"}
    for name in after:
        if "q_proj" in name or "down_proj" in name:
            values = torch.linalg.svdvals(after[name].float() - before[name].float())
            assert values[2:].max() < 5e-3 < values[0]
    assert type(AutoModelForCausalLM.from_pretrained(tuned)).__name__ == "LlamaForCausalLM"


# What is written


def test_a_tuned_checkpoint_has_its_tokens_type_and_files_and_drafts_change_no_output(
    whole: TuningOutcome, tunings: Tunings
) -> None:
    tuned = tunings.whole
    entries = json.loads((tuned / "sar_config.json").read_text())
    (measured,) = read_sar_config(tuned).acceptance
    assert entries.pop("acceptance") == [json.loads(json.dumps(asdict(measured)))]
    expected = {"mask_tokens": ["[M]"], "mask_slots": 3, "fork_token": "[Fork]", "child_token": "[Child]"}
    (phrases,) = (one for one in read_mechanisms(tuned, read_sar_config(tuned)) if isinstance(one, Phrases))
    assert entries == {**expected, "method": "tune", "mechanisms": {"phrases": phrases.entry}}
    assert {tensor.dtype for tensor in weights(tuned).values()} == {torch.float16}
    assert json.loads((tuned / "config.json").read_text())["dtype"] == "float16"
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tuned / name).read_bytes() == (TINY / name).read_bytes()
    with checkpoint_runtime(open_checkpoint(tuned, TokenFlags()), 128, 1) as runtime:
        plain, drafted = (
            runtime.generate("import json", Decoding(max_tokens=12, mask_slots=slots)).tokens for slots in (0, 3)
        )
    assert plain == drafted


def test_the_rates_of_the_last_validation_are_stored(whole: TuningOutcome, tunings: Tunings) -> None:
    (measured,) = open_checkpoint(tunings.whole, TokenFlags()).drafts.acceptance
    last = whole.last("validation")
    assert last is not None
    assert measured.rates == tuple(round(rate, 4) for rate in accumulate(last["acceptance"], min))
    assert 0 < measured.rates[0] == round(last["accuracies"][1], 4)
    assert (measured.data, measured.lookup, measured.temperature) == ("validation data data.jsonl", (), 0.0)
    assert measured.tokens > 0
    assert read_sar_config(tunings.by_method("lora")).acceptance == ()  # trained without validation data


def test_metrics_the_card_and_learning_rates_follow_data_and_settings(whole: TuningOutcome, tunings: Tunings) -> None:
    lines = measurements(tunings.whole)
    kinds = [(2, "training"), (3, "validation"), (4, "training"), (6, "training"), (6, "validation")]
    assert [(line["step"], line["kind"]) for line in lines] == kinds
    for line in lines:
        assert (line["steps"], line["epoch"]) == (6, line["step"] / 3)
        assert len(line["losses"]) == len(line["accuracies"]) == 4
    assert lines[-1]["losses"][0] < lines[1]["losses"][0]
    card = (tunings.whole / "README.md").read_text("utf-8").splitlines()
    assert {"# tiny, tuned with spaceport", "| forked | 4 |", "| unforked | 8 |"} <= {*card}
    expected = [5e-4, 1e-3, *(5e-4 * (1 + math.cos(math.pi * share / 4)) for share in range(4))]
    assert tunings.rates == pytest.approx(expected)
    assert lines[-2]["learning_rate"] == pytest.approx(0)


def test_tied_weights_stay_tied_after_a_cast_and_wide_ones_are_written_as_float32() -> None:
    one = torch.ones(2, 3)
    found = _cast({"a": one, "b": one, "c": torch.ones(2, 3)}, torch.float16)
    assert found["a"] is found["b"] is not found["c"]
    assert found["c"].dtype == torch.float16
    narrow, wide = torch.tensor([65504.0]), torch.tensor([70000.0])
    assert _wide_enough([narrow, torch.tensor([1 << 40]), torch.empty(0)], torch.float16) == torch.float16
    assert _wide_enough([narrow, wide], torch.float16) == torch.float32
    assert _wide_enough([narrow, wide], torch.bfloat16) == torch.bfloat16


# How it is computed


def test_micro_batches_and_checkpointing_change_no_weight(tunings: Tunings, tmp_path: Path) -> None:
    checkpoint = float32_tiny(tmp_path / "checkpoint")
    settings = replace(SETTINGS, max_steps=2, learning_rate=1e-4, warmup=0.0)
    plain = tunings.job(tmp_path / "plain", settings, checkpoint=checkpoint)
    small = replace(plain, target=tmp_path / "small", settings=replace(settings, micro_batch_size=1))
    again = replace(plain, target=tmp_path / "again", recompute=True)
    for job in (plain, small, again):
        train(job)
    expected = weights(plain.target)
    for job in (small, again):
        found = weights(job.target)
        assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 1e-6
