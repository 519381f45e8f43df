"""Forked tunings: runs of `spaceport tune` in forked processes, which import torch once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.launched import free_port

# Runs tunings in order, each with as many forked processes as it has lists of arguments, and prints their exit codes.
# Output, gradient norms and learning rates go to files. The second process of a tuning is asked to stop after `steps`
# steps, or kills itself then or at another moment.
# argv: a list of [name, steps, what the second process does, port, arguments of each process] as JSON.
PROGRAM = """
import json, os, signal, sys
from accelerate import Accelerator
from spaceport.tools.cli import run
from spaceport.tools.terminal import tuning_screen
from spaceport.tools.tune import tuning
from spaceport.tools.tune.training import Training
run_step, agree = Training.run_step, Training.agree

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

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
            die()
    Training.run_step = recorded
    if then == "die while a state is saved" and rank == 1:
        Accelerator.save_state = die
    if then == "die while the first process writes" and rank == 1:
        tuning.nullcontext = die  # where the first process enters the folder to write
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


def request(target: Path, order: list[str], processes: int, *more: str, after: int = 0, then: str = "") -> list[object]:
    """A tuning for the program."""
    arguments = [str(target) if argument == "TUNED" else argument for argument in order]
    return [str(target), after, then, free_port(), [[*arguments, *more]] * processes]


def codes(*tunings: list[object]) -> list[list[int]]:
    """Run tunings; the exit codes of their processes."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(tunings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return [json.loads(line) for line in done.stdout.splitlines()]
