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
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import FAULT, INPUT, USAGE
from spaceport.tools.tune.processes import open_accelerator
from support.launched import float32_tiny, free_port

# Runs tunings in order, each with as many forked processes as it has lists of arguments, and prints their exit codes.
# Output, gradient norms and learning rates go to files. The second process of a tuning is asked to stop after `steps`
# steps, or kills itself.
# argv: a list of [name, steps, what the second process does then, port, arguments of each process] as JSON.
PROGRAM = """
import json, os, signal, sys
from spaceport.tools.cli import run
from spaceport.tools.terminal import tuning_screen
from spaceport.tools.tune import tuning
from spaceport.tools.tune.training import Training
run_step, agree = Training.run_step, Training.agree

def tune(name, after, then, port, arguments, processes, rank):
    if processes > 1:  # as torchrun sets it
        environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({key: str(value) for key, value in environment.items()})
    for number, kind in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{name}-{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    def recorded(self):
        run_step(self)
        with open(f"{name}-steps-{rank}", "a") as file:
            print(float(self.norms), self._optimizer.param_groups[0]["lr"], file=file)
        if then == "die" and rank == 1 and self.step == after:
            os.kill(os.getpid(), signal.SIGKILL)
    Training.run_step = recorded
    if then == "stop" and rank == 1:
        Training.agree = lambda self, stop: agree(self, stop or self.step == after)
    return run(arguments)

for name, after, then, port, all_arguments in json.loads(sys.argv[1]):
    children = []
    for rank, arguments in enumerate(all_arguments):
        children.append(os.fork())
        if not children[-1]:
            code = 99
            try:
                code = tune(name, after, then, port, arguments, len(all_arguments), rank)
                sys.stdout.flush()
            finally:
                os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@pytest.fixture
def order(tmp_path: Path) -> list[str]:
    """Arguments for tuning a float32 tiny checkpoint: seven samples of different sizes, three per step."""
    checkpoint = float32_tiny(tmp_path / "checkpoint")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "import json\n" * (1 + number)}) + "\n" for number in range(7)))
    options = "--batch-size 3 --micro-batch-size 1 --max-steps 4 --epochs 9 --anchors 3 --log-every 1 --learning-rate 1e-4 --json"
    return ["tune", str(checkpoint), "TUNED", str(data), "--validation", str(data), *options.split()]


def request(target: Path, order: list[str], processes: int, *more: str, after: int = 0, then: str = "") -> list[object]:
    """A tuning for the program."""
    arguments = [str(target) if argument == "TUNED" else argument for argument in order]
    return [str(target), after, then, free_port(), [[*arguments, *more]] * processes]


def codes(*tunings: list[object]) -> list[list[int]]:
    """Run tunings; the exit codes of their processes."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(tunings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return [json.loads(line) for line in done.stdout.splitlines()]


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
        assert (measured["step"], measured["kind"], measured["tokens"]) == (
            expected["step"],
            expected["kind"],
            expected["tokens"],
        )
    # Adam hides the size of gradients; it is the same too
    norms = [[norm for norm, _ in steps_of(folder, 0)] for folder in (one, two)]
    assert norms[1][:3] == pytest.approx(norms[0][:3], rel=1e-4)
    assert json.loads((tmp_path / "two-out-0").read_text())["training"]["step"] == 4
    assert (tmp_path / "two-out-1").read_text() == ""


@pytest.mark.slow
def test_a_process_that_loses_another_one_ends_and_a_resume_loses_nothing(order: list[str], tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    found = codes(
        request(whole, order, 2),
        request(lost, order, 2, "--auto-resume", "--save-every", "2", after=3, then="die"),
    )
    assert found == [[0, 0], [FAULT, -signal.SIGKILL]]
    (message,) = [
        line for line in (tmp_path / "lost-errors-0").read_text().splitlines() if line.startswith("spaceport:")
    ]
    assert message == (
        "spaceport: rank 0: lost another process, whose messages say why; the state after step 2 is saved: start all "
        "processes again with --resume"
    )
    assert [path.name for path in (tmp_path / "lost.training").glob("step-*")] == ["step-00000002"]
    assert codes(request(lost, order, 2, "--auto-resume", "--save-every", "2")) == [[0, 0]]
    first, second = weights_of(whole), weights_of(lost)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "lost.training").exists()


@pytest.mark.slow
def test_processes_with_a_time_budget_have_the_same_learning_rates(order: list[str], tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    options = ["--max-steps", "40", "--epochs", "99", "--time-budget", "2s", "--save-every", "99"]
    assert codes(request(target, order, 2, *options)) == [[0, 0]]
    assert steps_of(target, 0) == steps_of(target, 1)
    assert len({rate for _, rate in steps_of(target, 0)}) > 1


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
    assert re.search(
        r"rank 0: the processes .* differ \(data: data.jsonl \w+ on rank 0, data.jsonl \w+ on", messages[0]
    )
    assert "differ (learning_rate: 0.0001 on rank 0, 0.0002 on rank 1): start all of them with the same" in messages[1]
    assert re.search(r"rank 0: rank 1 cannot start: \S+missing.jsonl: no such file", messages[2])
    assert not list(tmp_path.glob("*.training"))


METHODS = (
    "--objective both",
    "--objective both --gradient-checkpointing",
    "--objective both --weight-decay 0.1 --clip 0.1",
    "--objective both --batch-size 1",  # the second process has only padding
    "--objective both --batch-size 7 --micro-batch-size 4 --distinct --drop-rate 0.5",
    "--objective both --correction-rank 8",
    "--objective both --method embeddings",
    "--objective both --method embeddings --batch-size 1",
    "--objective both --method lora --rank 2",
    "--objective both --method lora --rank 2 --gradient-checkpointing",
    "--objective both --method gated-lora --rank 2",
    "--method gated-lora --rank 2",
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
    common = ["--learning-rate", "1e-3", "--max-steps", "8", "--save-every", "4"]
    tunings = [
        request(tmp_path / f"{processes}-{number}", order, processes, *common, *options.split())
        for number, options in enumerate(METHODS)
        for processes in (1, 2)
    ]
    assert codes(*tunings) == [[0], [0, 0]] * len(METHODS)
    for number, options in enumerate(METHODS):
        one, two = (
            [json.loads(line)["losses"] for line in (tmp_path / f"{processes}-{number}" / "metrics.jsonl").open()]
            for processes in (1, 2)
        )
        assert len(one) == len(two) == 8 + 2
        for expected, found in zip(one, two, strict=True):
            # float32 rounds a loss above 10 by more than 5e-7, and hundreds of them are added
            assert found == pytest.approx(expected, abs=1e-5, rel=1e-6), options


LAUNCHES = [
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "asked for several processes and has started one"),
    (
        {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ),
]


@pytest.mark.parametrize(("environment", "message"), LAUNCHES)
def test_a_launch_that_cannot_work_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionFault, match=re.escape(message)):
        open_accelerator(bf16=False, timeout=1.0)


WORKING = [
    {"ACCELERATE_MIXED_PRECISION": "no"},
    {"MASTER_PORT": "29500"},
    {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "1"},
    {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": "1"},
]


@pytest.mark.parametrize("environment", WORKING)
def test_one_process_needs_no_launcher(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert open_accelerator(bf16=False, timeout=1.0).num_processes == 1


def test_auto_resume_is_refused_beside_options_that_a_restart_would_misread(order: list[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path / "tuned") if argument == "TUNED" else argument for argument in order]
    for other in ("--resume", "--overwrite"):
        assert run([*arguments, "--auto-resume", other]) == USAGE
    assert run([*arguments, "--process-timeout", "0s"]) == USAGE
    assert not (tmp_path / "tuned.training").exists()
