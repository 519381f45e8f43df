"""Killed: commands in forked children of one process that has imported torch, started and ended by a test.

As a program, it forks a child for each line on standard input, a JSON list of arguments, that runs this `spaceport`
command. It prints `ready` first, then the id of each child, and how it ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from support.paths import TESTS, TINY


class Commands:
    """Runs `spaceport` commands, one at a time; the first one in the process that forks the others.

    What they print to stderr is appended to the file `errors`.
    """

    def __init__(self, first: Sequence[str], errors: Path | str = os.devnull) -> None:
        command = [sys.executable, "-m", "support.killed", *first]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))}
        with Path(errors).open("ab") as file:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
            self._popen = subprocess.Popen(command, bufsize=0, env=environment, **pipes)
        assert self._line() == "ready"

    def start(self, command: Sequence[str]) -> int:
        """Start a command; returns the id of its process."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command).encode() + b"\n")
        return int(self._line())

    def end(self) -> int:
        """Wait for the command: its exit code, or minus the signal that killed it."""
        return int(self._line())

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end; returns its exit code."""
        self.start(command)
        return self.end()

    def close(self) -> None:
        """End the process after the command that it runs."""
        self._popen.communicate()

    def _line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().decode().strip()


def kill(process: int, kind: int = signal.SIGKILL) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(process, kind)


def smallest_checkpoint(folder: Path) -> Path:
    """The tiny checkpoint with one layer of random weights, in a new folder: an export of it takes the least time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(TINY, num_hidden_layers=1)).save_pretrained(folder)
    return folder


def main(first: list[str]) -> None:
    """Run the first command, so that its one-time work is done, then one in a child for each line."""
    import torch

    from spaceport.exporter.checkpoint import quiet_libraries
    from spaceport.tools.cli import run

    torch.set_num_threads(1)
    quiet_libraries()
    commands = os.fdopen(os.dup(0), "r")
    with os.fdopen(os.dup(1), "w") as answers:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # messages of the command would be read as process ids
        if run(first):
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
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
