"""Processes: several train like one, stop after the same step, and print once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.paths import TINY

# Runs tunings in order, each with the given number of forked processes, and prints their exit codes. Output and gradient
# norms go to files. The second process of a tuning is asked to stop after `steps` steps.
# argv: a list of [name, processes, steps, port, arguments] as JSON.
PROGRAM = """
import json, os, sys
from spaceport.tools.cli import run
from spaceport.tools.terminal import tuning_screen
from spaceport.tools.tune import tuning
from spaceport.tools.tune.training import Training
run_step, agree = Training.run_step, Training.agree

def tune(name, processes, after, port, arguments, rank):
    if processes > 1:  # as accelerate launch and torchrun set it
        environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({key: str(value) for key, value in environment.items()}, ACCELERATE_USE_CPU="true")
    for number, kind in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{name}-{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    def recorded(self):
        run_step(self)
        with open(f"{name}-norms-{rank}", "a") as file:
            print(float(self.norms), file=file)
    Training.run_step = recorded
    if after and rank == 1:
        Training.agree = lambda self, stop: agree(self, stop or self.step == after)
    return run(arguments)

for name, processes, after, port, arguments in json.loads(sys.argv[1]):
    children = []
    for rank in range(processes):
        children.append(os.fork())
        if not children[-1]:
            code = 99
            try:
                code = tune(name, processes, after, port, arguments, rank)
                sys.stdout.flush()
            finally:
                os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


def port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


@pytest.fixture
def order(tmp_path: Path) -> list[str]:
    """Arguments for tuning a float32 tiny checkpoint: seven samples of different sizes, three per step."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    for file in TINY.iterdir():
        if not (checkpoint / file.name).exists() and file.suffix in (".json", ".jinja"):
            (checkpoint / file.name).write_bytes(file.read_bytes())
    (checkpoint / "sar_config.json").write_bytes((TINY / "sar_config.json").read_bytes())
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "import json\n" * (1 + number)}) + "\n" for number in range(7)))
    options = "--batch-size 3 --micro-batch-size 1 --max-steps 4 --epochs 9 --anchors 3 --log-every 1 --learning-rate 1e-4 --json"
    return ["tune", str(checkpoint), "TUNED", str(data), "--validation", str(data), *options.split()]


def test_two_processes_train_like_one_even_after_a_resume(order: list[str], tmp_path: Path) -> None:
    def request(name: str, processes: int, after: int, *more: str) -> list[object]:
        target = str(tmp_path / name)
        arguments = [target if argument == "TUNED" else argument for argument in order]
        return [target, processes, after, port(), [*arguments, *more]]

    tunings = [request("one", 1, 0), request("two", 2, 3), request("two", 2, 0, "--resume")]
    command = [sys.executable, "-c", PROGRAM, json.dumps(tunings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    errors = {file.name: file.read_text() for file in tmp_path.glob("*-errors-*")}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[0], [130, 130], [0, 0]], errors
    assert errors["two-errors-1"] == ""
    assert "7 samples, 4 steps, 1.33 epochs, 3 done" in errors["two-errors-0"]
    assert not (tmp_path / "two.training").exists()
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 5
    for expected, found in zip(*(map(json.loads, kept) for kept in lines), strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["accuracies"] == pytest.approx(expected["accuracies"])
        assert (found["step"], found["kind"], found["tokens"]) == (
            expected["step"],
            expected["kind"],
            expected["tokens"],
        )
    # Adam hides the size of gradients; it is the same too
    norms = [
        [float(line) for line in (tmp_path / f"{name}").read_text().split()] for name in ("one-norms-0", "two-norms-0")
    ]
    assert norms[1][:3] == pytest.approx(norms[0][:3], rel=1e-4)
    assert json.loads((tmp_path / "two-out-0").read_text())["training"]["step"] == 4
    assert (tmp_path / "two-out-1").read_text() == ""
