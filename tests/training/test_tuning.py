"""Tuning: resuming, what each method changes, what is written, and several processes that train like one."""

from __future__ import annotations

import json
import math
import signal
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
from spaceport.exporter.checkpoint_files import read_sar_config
from spaceport.exporter.draft_files import read_mechanisms
from spaceport.graphs.mechanism import Phrases
from spaceport.runtime.decoding import Decoding
from spaceport.tools.cli import INPUT, INTERRUPTED, OK
from spaceport.training.settings import TrainingSettings, TuningJob, TuningOutcome
from spaceport.training.training import Training
from spaceport.training.tuned_checkpoint import _cast, _wide_enough
from spaceport.training.tuning import train
from spaceport.verify.reference import checkpoint_runtime
from support.paths import TINY
from support.tunings import after_each_step, codes, float32_tiny, request, stopped

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


# Several processes

DIED = -signal.SIGKILL


@pytest.fixture
def order(tmp_path: Path) -> list[str]:
    """Arguments for tuning a float32 tiny checkpoint: seven samples of different sizes, three per step."""
    checkpoint = float32_tiny(tmp_path / "checkpoint")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "import json\n" * (1 + number)}) + "\n" for number in range(7)))
    options = "--batch-size 3 --micro-batch-size 1 --max-steps 4 --epochs 9 --anchors 3 --log-every 1 --learning-rate 1e-4 --json"
    return ["tune", str(checkpoint), "TUNED", str(data), "--validation", str(data), *options.split()]


def steps_of(target: Path, rank: int) -> list[tuple[float, float]]:
    """The sum of the gradient norms and the learning rate of each step of a process."""
    lines = target.with_name(f"{target.name}-steps-{rank}").read_text().splitlines()
    return [(float(norm), float(rate)) for norm, rate in map(str.split, lines)]


def errors_of(target: Path, rank: int = 0) -> str:
    return target.with_name(f"{target.name}-errors-{rank}").read_text()


def require_equal_losses(one: Path, two: Path, count: int) -> None:
    """Losses begin above 14, which float32 rounds by 1e-6, and hundreds of them are added."""
    assert len(measurements(one)) == len(measurements(two)) == count
    for expected, found in zip(measurements(one), measurements(two), strict=True):
        assert [loss is None for loss in found["losses"]] == [loss is None for loss in expected["losses"]]
        known, same_slots = ([loss for loss in each["losses"] if loss is not None] for each in (expected, found))
        assert same_slots == pytest.approx(known, abs=1e-5, rel=2e-6)


def test_a_killed_training_is_continued_to_the_same_weights(order: list[str], tmp_path: Path) -> None:
    whole, between, saving = (tmp_path / name for name in ("whole", "between", "saving"))
    often, resumed = ("--save-every", "2"), ("--save-every", "2", "--resume")
    found = codes(
        request(whole, order, 1),
        request(between, order, 1, *often, after=3, then="die"),
        request(between, order, 1, *resumed),
        request(saving, order, 1, *often, after=3, then="saved"),
        request(saving, order, 1, *resumed),
    )
    assert found == [[OK], [DIED], [OK], [DIED], [OK]]
    for folder in (between, saving):
        assert "7 samples, 4 steps, 1.33 epochs, 2 done" in errors_of(folder)
        assert not folder.with_name(f"{folder.name}.training").exists()
        assert not changed(weights(whole), weights(folder))


def test_two_processes_train_like_one_even_after_a_resume(order: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stopped = request(two, order, 2, after=3, then="stop")
    found = codes(request(one, order, 1), stopped, request(two, order, 2, "--resume"))
    assert found == [[OK], [INTERRUPTED] * 2, [OK, OK]], errors_of(two)
    assert errors_of(two, 1) == (tmp_path / "two-out-1").read_text() == ""
    assert "7 samples, 4 steps, 1.33 epochs, 3 done, 2 processes" in errors_of(two)
    assert json.loads((tmp_path / "two-out-0").read_text())["training"]["step"] == 4
    assert not (tmp_path / "two.training").exists()
    first, second = weights(one), weights(two)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
    require_equal_losses(one, two, 5)
    for expected, other in zip(measurements(one), measurements(two), strict=True):
        assert other["accuracies"] == pytest.approx(expected["accuracies"])
        assert [other[key] == expected[key] for key in ("step", "kind", "tokens")] == [True] * 3
    # Adam hides the size of gradients; it is the same too
    norms = [[norm for norm, _ in steps_of(folder, 0)] for folder in (one, two)]
    assert norms[1][:3] == pytest.approx(norms[0][:3], rel=1e-4)


@pytest.mark.nightly
def test_processes_with_other_settings_are_refused(order: list[str], tmp_path: Path) -> None:
    assert codes(request(tmp_path / "tuned", order, 2, then="differ")) == [[INPUT, INPUT]]
    assert "the processes of this training have other data, settings or states" in errors_of(tmp_path / "tuned", 1)
    assert not (tmp_path / "tuned.training").exists()


@pytest.mark.nightly
def test_processes_with_a_time_budget_have_the_same_learning_rates(order: list[str], tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    options = ["--max-steps", "40", "--epochs", "99", "--time-budget", "2s", "--save-every", "99"]
    assert codes(request(target, order, 2, *options)) == [[0, 0]]
    assert steps_of(target, 0) == steps_of(target, 1)
    assert len({rate for _, rate in steps_of(target, 0)}) > 1


OF_PROCESSES = (
    "--objective both --weight-decay 0.1 --clip 0.1 --gradient-checkpointing",
    "--objective both --batch-size 7 --micro-batch-size 4 --distinct --drop-rate 0.5",
    "--objective both --method embeddings --batch-size 1",  # the second process has only padding
    "--objective both --method lora --rank 2 --correction-rank 8",
    "--method gated-lora --rank 2 --correction-rank 8 --batch-size 1",
    "--method gated-lora --rank 2 --gradient-checkpointing",
)


@pytest.mark.nightly
def test_each_method_has_the_losses_of_one_process(order: list[str], tmp_path: Path) -> None:
    answer = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea"
    with (tmp_path / "data.jsonl").open("a") as file:
        for number in range(4):
            file.write(json.dumps({"prompt": f"Which {number}?", "response": answer}) + "\n")
    tunings = [
        request(tmp_path / f"{processes}-{number}", order, processes, "--max-steps", "8", *options.split())
        for number, options in enumerate(OF_PROCESSES)
        for processes in (1, 2)
    ]
    assert codes(*tunings) == [[0], [0, 0]] * len(OF_PROCESSES)
    for number in range(len(OF_PROCESSES)):
        require_equal_losses(tmp_path / f"1-{number}", tmp_path / f"2-{number}", 8 + 1)
