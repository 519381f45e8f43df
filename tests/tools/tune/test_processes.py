"""Processes: several train like one, stop after the same step, end when one is lost, and print once."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli import FAULT, INPUT, OK
from spaceport.tools.tune.processes import open_accelerator
from support import forked_tunings
from support.forked_tunings import codes, float32_tiny, request

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


def same(one: Path, two: Path) -> bool:
    """Whether two trainings have the same weights, bit by bit, and left nothing else behind."""
    first, second = weights_of(one), weights_of(two)
    left = any(each.with_name(f"{each.name}.training").exists() for each in (one, two))
    return not left and all(torch.equal(first[name], second[name]) for name in first)


def measured(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]


def require_equal_losses(one: Path, two: Path, measurements: int) -> None:
    """Losses begin above 14, which float32 rounds by 1e-6, and hundreds of them are added."""
    assert len(measured(one)) == len(measured(two)) == measurements
    for expected, found in zip(measured(one), measured(two), strict=True):
        assert [loss is None for loss in found["losses"]] == [loss is None for loss in expected["losses"]]
        known, same_slots = ([loss for loss in each["losses"] if loss is not None] for each in (expected, found))
        assert same_slots == pytest.approx(known, abs=1e-5, rel=2e-6)


@pytest.mark.slow
def test_two_processes_train_like_one_even_after_a_resume(order: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stopped = request(two, order, 2, after=3, then="stop")
    found = codes(request(one, order, 1), stopped, request(two, order, 2, "--resume"))
    assert found == [[0], [130, 130], [0, 0]], errors_of(two)
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
@pytest.mark.slow
def test_a_process_that_loses_another_one_ends_and_a_resume_loses_nothing(order: list[str], tmp_path: Path) -> None:
    names = ("whole", "lost", "first", "unsaved", "written", "silent", "alone")
    whole, lost, first, unsaved, written, silent, alone = (tmp_path / name for name in names)
    options = ["--auto-resume", "--save-every", "2"]
    found = codes(
        request(whole, order, 2),
        request(lost, order, 2, *options, after=3, then="die"),
        request(lost, order, 2, *options),
        request(first, order, 2, *options, after=3, then="die", who=0),
        request(unsaved, order, 2, *options, then="die while a state is saved"),
        request(written, order, 2, then="die while the first process writes"),
        request(silent, order, 2, "--process-timeout", "4s", after=2, then="hang"),
        request(alone, order, 2, "--process-timeout", "2s", then="never start"),
    )
    assert found == [
        *([OK, OK], [FAULT, DIED], [OK, OK], [DIED, FAULT], [FAULT, DIED], [OK, DIED], [FAULT, DIED], [FAULT, 0]),
    ]
    message = "rank 0: lost another process, whose messages say why; no state is saved yet: start all processes again\n"
    assert errors_of(unsaved).endswith(message)
    assert not list(unsaved.with_name("unsaved.training").glob("step-*[0-9]"))
    message = r"rank 1: lost another process, .*; the state after step 2 is saved: .* --resume\n$"
    assert re.search(message, errors_of(first, 1))
    assert "another process has not answered for 4 s (--process-timeout): it hangs, or its" in errors_of(silent)
    assert "2 processes expected, and not all have connected to 127.0.0.1:" in errors_of(alone)
    assert not [each for each in (unsaved, first, silent, alone) if "Traceback" in errors_of(each)]
    assert same(whole, lost)
    assert same(whole, written)
    assert "7 samples, 4 steps, 1.33 epochs, 2 done, 2 processes" in errors_of(lost)


@pytest.mark.nightly
@pytest.mark.slow
def test_machines_without_a_common_file_system_resume_from_copies_of_the_state(
    order: list[str], tmp_path: Path
) -> None:
    def apart(*more: str, **what: Any) -> dict[str, Any]:
        tuning = request(tmp_path / "tuned", order, 2, "--save-every", "2", *more, **what)
        first: list[str] = tuning["arguments"][0]
        return {**tuning, "arguments": [first, [each.replace("/tuned", "/other") for each in first]]}

    found = codes(request(tmp_path / "whole", order, 2), apart(after=3, then="die"), apart("--resume"))
    assert found == [[OK, OK], [FAULT, DIED], [INPUT, INPUT]]
    message = r"saved state: step 2 \(\w+\) on rank 0, none on rank 1\): TUNED.training must"
    assert re.search(message, errors_of(tmp_path / "tuned"))
    shutil.copytree(tmp_path / "tuned.training", tmp_path / "other.training", dirs_exist_ok=True)
    assert codes(apart("--resume")) == [[OK, OK]]
    assert same(tmp_path / "whole", tmp_path / "tuned")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.nightly
@pytest.mark.slow
def test_torchrun_restarts_killed_processes_and_the_weights_stay_the_same(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, target = tmp_path / "whole", tmp_path / "tuned"
    assert codes(request(whole, order, 2)) == [[OK, OK]]
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    tuning = request(target, order, 2, "--auto-resume", "--save-every", "1", after=2, then="restarts")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", forked_tunings.__file__]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    subprocess.run([torchrun, *options, json.dumps([tuning])], check=True, timeout=500)
    assert same(whole, target)
    assert re.search(r", 2 done, 2 processes", errors_of(target))


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_with_a_time_budget_have_the_same_learning_rates(order: list[str], tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    options = ["--max-steps", "40", "--epochs", "99", "--time-budget", "2s", "--save-every", "99"]
    assert codes(request(target, order, 2, *options)) == [[0, 0]]
    assert steps_of(target, 0) == steps_of(target, 1)
    assert len({rate for _, rate in steps_of(target, 0)}) > 1


@pytest.mark.nightly
@pytest.mark.slow
def test_processes_with_different_inputs_are_refused(order: list[str], tmp_path: Path) -> None:
    data, other = str(tmp_path / "data.jsonl"), tmp_path / "other" / "data.jsonl"
    other.parent.mkdir()
    other.write_text(Path(data).read_text() + '{"text": "More."}\n')
    changes = ({data: str(other)}, {"1e-4": "2e-4"}, {data: str(tmp_path / "missing.jsonl")})
    tunings = [request(tmp_path / f"tuned-{number}", order, 2) for number in range(3)]
    for tuning, change in zip(tunings, changes, strict=True):
        first: list[str] = tuning["arguments"][0]
        tuning["arguments"] = [first, [change.get(argument, argument) for argument in first]]
    assert codes(*tunings) == [[INPUT, INPUT]] * 3
    messages = [errors_of(tmp_path / f"tuned-{number}") for number in range(3)]
    assert re.search(r"processes .* differ \(data: data.jsonl \w+ on rank 0, data.jsonl \w+ on", messages[0])
    assert "differ (learning_rate: 0.0001 on rank 0, 0.0002 on rank 1): start all of them with the same" in messages[1]
    assert re.search(r"rank 0: rank 1 cannot start: \S+missing.jsonl: no such file", messages[2])
    assert not list(tmp_path.glob("*.training"))


METHODS = (
    "--objective both --weight-decay 0.1 --clip 0.1 --gradient-checkpointing",
    "--objective both --batch-size 7 --micro-batch-size 4 --distinct --drop-rate 0.5",
    "--objective both --method embeddings --batch-size 1",  # the second process has only padding
    "--objective both --method lora --rank 2 --correction-rank 8",
    "--method gated-lora --rank 2 --correction-rank 8 --batch-size 1",
    "--method gated-lora --rank 2 --gradient-checkpointing",
    "--self-distill",
)


@pytest.mark.slow
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


LAUNCHES = [
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "asked for several processes and has started one"),
    ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, ""),
    ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": "1"}, ""),
]


@pytest.mark.parametrize(("environment", "refused"), LAUNCHES)
def test_one_process_needs_no_launcher_and_a_launch_that_cannot_work_is_refused(
    environment: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not refused:
        assert open_accelerator(bf16=False, timeout=1.0).num_processes == 1
        return
    with pytest.raises(OptionFault, match=refused):
        open_accelerator(bf16=False, timeout=1.0)
