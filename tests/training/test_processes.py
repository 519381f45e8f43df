"""Processes: killed ones are continued without a difference, and several train like one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spaceport.tools.cli import INPUT, INTERRUPTED, OK
from support.tunings import codes, float32_tiny, request

pytestmark = pytest.mark.slow

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


def weights_of(target: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(target / "model.safetensors")
    return found


def measured(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]


def require_equal_losses(one: Path, two: Path, measurements: int) -> None:
    """Losses begin above 14, which float32 rounds by 1e-6, and hundreds of them are added."""
    assert len(measured(one)) == len(measured(two)) == measurements
    for expected, found in zip(measured(one), measured(two), strict=True):
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
        expected, same = weights_of(whole), weights_of(folder)
        assert all(torch.equal(expected[name], same[name]) for name in expected)


def test_two_processes_train_like_one_even_after_a_resume(order: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stopped = request(two, order, 2, after=3, then="stop")
    found = codes(request(one, order, 1), stopped, request(two, order, 2, "--resume"))
    assert found == [[OK], [INTERRUPTED] * 2, [OK, OK]], errors_of(two)
    assert errors_of(two, 1) == (tmp_path / "two-out-1").read_text() == ""
    assert "7 samples, 4 steps, 1.33 epochs, 3 done, 2 processes" in errors_of(two)
    assert json.loads((tmp_path / "two-out-0").read_text())["training"]["step"] == 4
    assert not (tmp_path / "two.training").exists()
    first, second = weights_of(one), weights_of(two)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
    require_equal_losses(one, two, 5)
    for expected, other in zip(measured(one), measured(two), strict=True):
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


METHODS = (
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
        for number, options in enumerate(METHODS)
        for processes in (1, 2)
    ]
    assert codes(*tunings) == [[0], [0, 0]] * len(METHODS)
    for number in range(len(METHODS)):
        require_equal_losses(tmp_path / f"1-{number}", tmp_path / f"2-{number}", 8 + 1)
