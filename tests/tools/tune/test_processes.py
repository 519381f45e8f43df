"""Processes: several train like one, stop after the same step, end when one is lost, and print once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.exit_codes import FAULT, INPUT, OK
from spaceport.tools.tune.processes import open_accelerator
from support.forked_tunings import codes, request
from support.launched import float32_tiny, free_port


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


def weights_of(target: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(target / "model.safetensors")
    return found


@pytest.mark.slow
def test_two_processes_train_like_one_even_after_a_resume(order: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    found = codes(
        request(one, order, 1),
        request(two, order, 2, after=3, then="stop"),
        request(two, order, 2, "--resume"),
    )
    errors = {file.name: file.read_text() for file in tmp_path.glob("*-errors-*")}
    assert found == [[0], [130, 130], [0, 0]], errors
    assert errors["two-errors-1"] == ""
    assert "7 samples, 4 steps, 1.33 epochs, 3 done, 2 processes" in errors["two-errors-0"]
    assert not (tmp_path / "two.training").exists()
    first, second = weights_of(one), weights_of(two)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (one, two)]
    assert len(lines[0]) == len(lines[1]) == 5
    for expected, measured in zip(*(map(json.loads, kept) for kept in lines), strict=True):
        assert measured["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert measured["accuracies"] == pytest.approx(expected["accuracies"])
        assert [measured[key] == expected[key] for key in ("step", "kind", "tokens")] == [True] * 3
    # Adam hides the size of gradients; it is the same too
    norms = [[norm for norm, _ in steps_of(folder, 0)] for folder in (one, two)]
    assert norms[1][:3] == pytest.approx(norms[0][:3], rel=1e-4)
    assert json.loads((tmp_path / "two-out-0").read_text())["training"]["step"] == 4
    assert (tmp_path / "two-out-1").read_text() == ""


def last_line(target: Path, rank: int) -> str:
    """The error of a process."""
    return target.with_name(f"{target.name}-errors-{rank}").read_text().splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_that_loses_another_one_ends_and_a_resume_loses_nothing(order: list[str], tmp_path: Path) -> None:
    whole, lost, unsaved, written = (tmp_path / name for name in ("whole", "lost", "unsaved", "written"))
    options = ["--auto-resume", "--save-every", "2"]
    found = codes(
        request(whole, order, 2),
        request(lost, order, 2, *options, after=3, then="die"),
        request(lost, order, 2, *options),
        request(unsaved, order, 2, *options, then="die while a state is saved"),
        request(written, order, 2, then="die while the first process writes"),
    )
    died = -signal.SIGKILL
    assert found == [[OK, OK], [FAULT, died], [OK, OK], [FAULT, died], [OK, died]]
    message = "spaceport: rank 0: lost another process, whose messages say why; no state is saved yet: start all processes again"
    assert last_line(unsaved, 0) == message
    assert not list(unsaved.with_name("unsaved.training").glob("step-*[0-9]"))
    for each in (lost, written):
        first, second = weights_of(whole), weights_of(each)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not each.with_name(f"{each.name}.training").exists()
    assert "7 samples, 4 steps, 1.33 epochs, 2 done, 2 processes" in (tmp_path / "lost-errors-0").read_text()


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
    other = tmp_path / "other"
    other.mkdir()
    (other / "data.jsonl").write_text((tmp_path / "data.jsonl").read_text() + '{"text": "More."}\n')
    data = str(tmp_path / "data.jsonl")
    tunings = []
    for change in ({data: str(other / "data.jsonl")}, {"1e-4": "2e-4"}, {data: str(other / "missing.jsonl")}):
        tuning = request(tmp_path / f"tuned-{len(tunings)}", order, 2)
        ((first, second),) = [tuning[-1]]  # type: ignore[misc]
        tuning[-1] = [first, [change.get(argument, argument) for argument in second]]
        tunings.append(tuning)
    assert codes(*tunings) == [[INPUT, INPUT]] * 3
    messages = [(tmp_path / f"tuned-{number}-errors-0").read_text() for number in range(3)]
    assert re.search(r"processes .* differ \(data: data.jsonl \w+ on rank 0, data.jsonl \w+ on", messages[0])
    assert "differ (learning_rate: 0.0001 on rank 0, 0.0002 on rank 1): start all of them with the same" in messages[1]
    assert re.search(r"rank 0: rank 1 cannot start: \S+missing.jsonl: no such file", messages[2])
    assert not list(tmp_path.glob("*.training"))


def losses_of(target: Path) -> list[dict[int, float]]:
    """The losses of each measurement that were measured, by their mask slot."""
    lines = (target / "metrics.jsonl").read_text().splitlines()
    return [{slot: loss for slot, loss in enumerate(json.loads(line)["losses"]) if loss is not None} for line in lines]


METHODS = (
    "--objective both --gradient-checkpointing",
    "--objective both --weight-decay 0.1 --clip 0.1",
    "--objective both --batch-size 1",  # the second process has only padding
    "--objective both --batch-size 7 --micro-batch-size 4 --distinct --drop-rate 0.5",
    "--objective both --correction-rank 8",
    "--objective both --method embeddings --batch-size 1",
    "--objective both --method lora --rank 2",
    "--objective both --method gated-lora --rank 2",
    "--method gated-lora --rank 2 --batch-size 1",
    "--method gated-lora --rank 2 --gradient-checkpointing",
    "--method gated-lora --rank 2 --correction-rank 8",
    "--self-distill",
)


@pytest.mark.slow
@pytest.mark.nightly
def test_each_method_has_the_losses_of_one_process(order: list[str], tmp_path: Path) -> None:
    answer = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea"
    lines = [{"prompt": f"Which {number}?", "response": answer} for number in range(4)]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    common = ["--max-steps", "8", "--save-every", "4"]
    tunings = [
        request(tmp_path / f"{processes}-{number}", order, processes, *common, *options.split())
        for number, options in enumerate(METHODS)
        for processes in (1, 2)
    ]
    assert codes(*tunings) == [[0], [0, 0]] * len(METHODS)
    for number, options in enumerate(METHODS):
        one, two = (losses_of(tmp_path / f"{processes}-{number}") for processes in (1, 2))
        assert len(one) == len(two) == 8 + 2
        for expected, found in zip(one, two, strict=True):
            # losses begin above 14, which float32 rounds by 1e-6, and hundreds of them are added
            assert found == pytest.approx(expected, abs=1e-5, rel=2e-6), options


# Two processes: the first one works for longer than the timeout, and says so now and then.
WORKING_PROCESSES = """
import os, sys, time
from spaceport.tools.tune.processes import by_main_process, open_accelerator

def work(going_on):
    end = time.monotonic() + 2.5 * timeout
    while time.monotonic() < end:
        time.sleep(0.1)
        going_on()
    return {"answers": [1, 2]}

timeout = 6.0
children = []
for rank in range(2):
    children.append(os.fork())
    if not children[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
        code = 99
        try:
            code = int(by_main_process(open_accelerator(False, timeout), work, timeout) != {"answers": [1, 2]})
        finally:
            os._exit(code)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_the_others_wait_for_work_of_the_first_process_and_get_its_result() -> None:
    command = [sys.executable, "-c", WORKING_PROCESSES, str(free_port())]
    subprocess.run(command, check=True, timeout=200)


LAUNCHES = [
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "asked for several processes and has started one"),
    ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, ""),
    ({"MASTER_PORT": "29500"}, ""),
    ({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "1"}, ""),
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
