"""Launched: trainings in processes that a launcher starts, and that a test kills; all have ended when the test ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from support.killed import kill
from support.paths import TINY

SECONDS = 300.0  # limit of each wait, also on a busy machine


def free_port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def float32_tiny(folder: Path) -> Path:
    """The tiny checkpoint in float32, in a new folder: differences of trainings are not hidden by rounding."""
    AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).save_pretrained(folder)
    for file in TINY.iterdir():
        if not (folder / file.name).exists() and file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    return folder


class Launch:
    """A running command and the processes that it has started, each with its own rank."""

    def __init__(self, command: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("w") as output:
            self._popen = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env={**os.environ, **environment}
            )

    @property
    def text(self) -> str:
        """What all processes have printed."""
        return self._log.read_text("utf-8")

    def send(self, kind: signal.Signals) -> None:
        """Send a signal to the command."""
        kill(self._popen.pid, kind)

    def ranks(self) -> dict[int, int]:
        """The processes of the command by their rank."""
        found = {}
        for process in _descendants(self._popen.pid):
            try:
                environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            found.update({int(each[5:]): process for each in environment if each.startswith(b"RANK=")})
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds while the command runs."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert self._popen.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.005)

    def code(self) -> int:
        """Wait for the end; its exit code, or minus the signal that killed it."""
        try:
            return self._popen.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {SECONDS:g} s\n{self.text}") from None

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in (*_descendants(self._popen.pid), self._popen.pid):
            kill(process)
        self._popen.wait()


@contextmanager
def launched(
    command: Sequence[str], log: Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Launch]:
    """A command of this environment's programs, started in a folder."""
    program = Path(sys.executable).with_name(command[0])
    launch = Launch([str(program), *command[1:]], log, folder or log.parent, environment or {})
    try:
        yield launch
    finally:
        launch.close()


@contextmanager
def machines(commands: Sequence[Sequence[str]], log: Path, folders: Sequence[Path]) -> Iterator[list[Launch]]:
    """A process for each command, as on machines of their own: no launcher ends the others when one has ended."""
    common = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launches: list[Launch] = []
    try:
        for rank, (command, folder) in enumerate(zip(commands, folders, strict=True)):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            program = str(Path(sys.executable).with_name(command[0]))
            launches.append(Launch([program, *command[1:]], log.with_name(f"{log.name}-{rank}"), folder, own))
        yield launches
    finally:
        for launch in launches:
            launch.close()


def _descendants(process: int) -> list[int]:
    """The running processes that a process has started, directly or through others."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [process]
    for above in found:
        found += [child for child, parent in parents if parent == above]
    return found[1:]
