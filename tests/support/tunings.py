"""Tunings that are watched, stopped or killed, alone and in several forked processes.

As a program it runs the tunings in its argument, in processes that are forked once torch is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from spaceport.tools.cli import run
from spaceport.training.settings import TuningJob
from spaceport.training.training import Training
from spaceport.training.tuning import train

TINY = Path(__file__).parents[1] / "data" / "tiny"  # as a program, this file cannot import its neighbours


@contextmanager
def after_each_step(act: Callable[[Training], object]) -> Iterator[None]:
    """Call a function after each step of all trainings in the block."""
    run_step = Training.run_step

    def stepped(training: Training) -> None:
        run_step(training)
        act(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "run_step", stepped)
        yield


def stopped(job: TuningJob, after: int) -> Path:
    """Interrupt a training after `after` steps of its own; returns the folder of its states."""
    left = [signal.SIGINT, *[None] * (after - 1)]

    def act(training: Training) -> None:
        if (number := left.pop()) is not None:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt), after_each_step(act):
        train(job)
    return job.target.with_name(f"{job.target.name}.training")


def float32_tiny(folder: Path) -> Path:
    """The tiny checkpoint in float32, in a new folder: differences of trainings are not hidden by rounding."""
    AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").save_pretrained(folder)
    for file in TINY.iterdir():
        if not (folder / file.name).exists() and file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    return folder


def request(
    target: Path, order: list[str], processes: int, *more: str, after: int = 0, then: str = ""
) -> dict[str, Any]:
    """A tuning in several processes; after step `after` they "stop", "die", or die when the next state is "saved".

    If they "differ", process 1 has another seed.
    """
    arguments = [str(target) if argument == "TUNED" else argument for argument in order] + [*more]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"name": str(target), "arguments": arguments, "processes": processes, "after": after, "then": then}
    return {**found, "port": port}


def codes(*tunings: dict[str, Any]) -> list[list[int]]:
    """Run tunings in order; the exit codes of their processes."""
    command = [sys.executable, __file__, json.dumps(tunings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tune(tuning: dict[str, Any], rank: int) -> int:
    """One process of a tuning. Output, gradient norms and learning rates go to files."""
    for number, kind in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{tuning['name']}-{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    save_state = Accelerator.save_state

    def act(training: Training) -> None:
        with Path(f"{tuning['name']}-steps-{rank}").open("a") as file:
            print(float(training.norms), training._optimizer.param_groups[0]["lr"], file=file)
        if training.step != tuning["after"]:
            return
        if tuning["then"] == "die":
            _die()
        if tuning["then"] == "stop" and rank == 1:  # the others learn of it
            signal.raise_signal(signal.SIGINT)
        if tuning["then"] == "saved":
            Accelerator.save_state = lambda *arguments: _die(save_state(*arguments))

    with after_each_step(act):
        other = ["--seed", "1"] if tuning["then"] == "differ" and rank else []
        return run([*tuning["arguments"], *other])


def _forked(tuning: dict[str, Any]) -> list[int]:
    """Run the processes of a tuning; their exit codes, or minus the signal that killed them."""
    children: list[int] = []
    for rank in range(tuning["processes"]):
        children.append(os.fork())
        if not children[-1]:
            code = 99
            try:
                if tuning["processes"] > 1:  # as torchrun sets it
                    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tuning["port"])}
                    os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tuning["processes"]))
                code = _tune(tuning, rank)
                sys.stdout.flush()
            finally:
                os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print(json.dumps(_forked(each)), flush=True)
