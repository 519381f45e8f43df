"""Forked tunings: runs of `spaceport tune` in forked processes, which import torch once for all of them.

As a program it runs the tunings in its argument, or under torchrun one process of the first of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from spaceport.tools.cli import run
from spaceport.tools.terminal import tuning_screen
from spaceport.tools.tune import tuning
from spaceport.tools.tune.training import Training

TINY = Path(__file__).parents[1] / "data" / "tiny"


def float32_tiny(folder: Path) -> Path:
    """The tiny checkpoint in float32, in a new folder: differences of trainings are not hidden by rounding."""
    AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).save_pretrained(folder)
    for file in TINY.iterdir():
        if not (folder / file.name).exists() and file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    return folder


def free_port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def request(
    target: Path, order: list[str], processes: int, *more: str, after: int = 0, then: str = "", who: int = 1
) -> dict[str, Any]:
    """A tuning: what process `who` does at the end of step `after`, or at another moment, and arguments of each process."""
    arguments = [[str(target) if argument == "TUNED" else argument for argument in order] + [*more]] * processes
    return {"name": str(target), "after": after, "then": then, "who": who, "port": free_port(), "arguments": arguments}


def codes(*tunings: dict[str, Any]) -> list[list[int]]:
    """Run tunings in order, each in as many processes as it has lists of arguments; the exit codes of their processes."""
    command = [sys.executable, __file__, json.dumps(tunings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tune(tuning_request: dict[str, Any], rank: int) -> int:
    """One process of a tuning. Output, gradient norms and learning rates go to files."""
    name, then, after = tuning_request["name"], tuning_request["then"], tuning_request["after"]
    acts = rank == tuning_request["who"]
    if then == "restarts":  # process 1 dies after a step, and after the first restart process 0 one step later
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        acts, after = rank == 1 - restarts, after + restarts
    for number, kind in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{name}-{kind}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    run_step, agree = Training.run_step, Training.agree

    def recorded(self: Training) -> None:
        run_step(self)
        with Path(f"{name}-steps-{rank}").open("a") as file:
            print(float(self.norms), self._optimizer.param_groups[0]["lr"], file=file)
        if acts and self.step == after and then in ("die", "restarts"):
            _die()
        if acts and self.step == after and then == "hang":
            time.sleep(1000)

    patches: list[tuple[Any, str, Any]] = [(Training, "run_step", recorded)]
    if acts and then == "die while a state is saved":
        patches.append((Accelerator, "save_state", _die))
    if acts and then == "die while the first process writes":
        patches.append((tuning, "nullcontext", _die))  # where the first process enters the folder to write
    if acts and then == "stop":
        patches.append((Training, "agree", lambda self, stop: agree(self, stop or self.step == after)))
    for patched, attribute, replacement in patches:
        setattr(patched, attribute, replacement)
    return 0 if acts and then == "never start" else run(tuning_request["arguments"][rank])


def _forked(tuning_request: dict[str, Any]) -> list[int]:
    """Run the processes of a tuning; their exit codes, or minus the signal that killed them."""
    children: list[int] = []
    processes = len(tuning_request["arguments"])
    for rank in range(processes):
        children.append(os.fork())
        if not children[-1]:
            code = 99
            try:
                if processes > 1:  # as torchrun sets it
                    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tuning_request["port"])}
                    os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
                code = _tune(tuning_request, rank)
                sys.stdout.flush()
            finally:
                os._exit(code)
    found = []
    for child in children:
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if tuning_request["then"] == "hang" and child == children[0]:
            os.kill(children[1], signal.SIGKILL)
    return found


if __name__ == "__main__":
    assert tuning_screen  # imported before the processes are forked
    requests = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        sys.exit(_tune(requests[0], int(os.environ["RANK"])))
    for each in requests:
        print(json.dumps(_forked(each)), flush=True)
