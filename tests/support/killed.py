"""Killed: commands in children of one process that has imported torch, started and ended by a test."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from support.paths import TESTS, TINY


class Commands:
    """Runs `spaceport` commands, one at a time."""

    def __init__(self, first: Sequence[str] = ()) -> None:
        command = [sys.executable, str(TESTS / "support" / "interrupted.py"), *first]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._popen = subprocess.Popen(command, bufsize=0, **pipes)
        assert self._line() == "ready"

    def start(self, command: Sequence[str]) -> int:
        """Start a command; returns the id of its process."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command).encode() + b"\n")
        return int(self._line())

    def ended(self) -> bool:
        """Whether the command has ended."""
        return bool(select.select([self._popen.stdout], [], [], 0)[0])

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


def smallest_checkpoint(folder: Path, layers: int = 1) -> Path:
    """The tiny checkpoint with few layers of random weights, in a new folder: an export of it takes the least time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    for file in TINY.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            shutil.copy(file, folder)
    config = LlamaConfig.from_pretrained(TINY)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
