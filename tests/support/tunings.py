"""Tunings that are watched, stopped or killed, alone and in several forked processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from spaceport.tools.cli import run
from spaceport.training.settings import TuningJob
from spaceport.training.training import Training
from spaceport.training.tuning import train
from support.copied_checkpoint import copy_of_tiny
from support.forked import exit_code, started
from support.paths import TINY
from support.programs import free_port


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
    AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").save_pretrained(copy_of_tiny(folder))
    return folder


@dataclass(frozen=True)
class Tuning:
    """A tuning in several processes."""

    target: Path
    arguments: tuple[str, ...]
    processes: int
    after: int  # step after which something happens
    then: str  # they "stop", "die", or die when the next state is "saved"; or they "differ": process 1 has another seed


def request(target: Path, order: list[str], processes: int, *more: str, after: int = 0, then: str = "") -> Tuning:
    arguments = [str(target) if argument == "TUNED" else argument for argument in order]
    return Tuning(target, (*arguments, *more), processes, after, then)


def codes(*tunings: Tuning) -> list[list[int]]:
    """Run tunings in order; the exit codes of their processes."""
    found = []
    for tuning in tunings:
        port = free_port()
        processes = [started(_tune, tuning, rank, port) for rank in range(tuning.processes)]
        found.append([exit_code(process) for process in processes])
    return found


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tune(tuning: Tuning, rank: int, port: int) -> int:
    """One process of a tuning. Output, gradient norms and learning rates go to files."""
    for number, kind in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{tuning.target}-{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if tuning.processes > 1:  # as torchrun sets it
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tuning.processes)}
    save_state = Accelerator.save_state

    def act(training: Training) -> None:
        with Path(f"{tuning.target}-steps-{rank}").open("a") as file:
            print(float(training.norms), training._optimizer.param_groups[0]["lr"], file=file)
        if training.step != tuning.after:
            return
        if tuning.then == "die":
            _die()
        if tuning.then == "stop" and rank == 1:  # the others learn of it
            signal.raise_signal(signal.SIGINT)
        if tuning.then == "saved":
            Accelerator.save_state = lambda *arguments: _die(save_state(*arguments))

    with after_each_step(act):
        other = ["--seed", "1"] if tuning.then == "differ" and rank else []
        return run([*tuning.arguments, *other])
