"""Interrupted: a process that has imported torch and runs commands in forked children, which tests kill.

For each line on standard input, a JSON list of arguments, it forks a child that runs this `spaceport` command.
It prints `ready` first, then the id of each child, and how it ended.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from spaceport.exporter import export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.tools.cli import run
from spaceport.tools.tune import tuning


def main(first: list[str]) -> None:
    """Serve commands; an optional first one is run here, so that its one-time work is done before children start."""
    torch.set_num_threads(1)
    quiet_libraries()
    assert tuning
    assert export
    commands = os.fdopen(os.dup(0), "r")
    with os.fdopen(os.dup(1), "w") as answers:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # messages of the command would be read as process ids
        if first and run(first):
            raise SystemExit(f"{first} failed")
        print("ready", file=answers, flush=True)
        for line in commands:
            child = os.fork()
            if child == 0:
                code = 130
                try:
                    code = run(json.loads(line))
                finally:
                    os._exit(code)
            print(child, file=answers, flush=True)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
