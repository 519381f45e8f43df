"""Programs: runs those that prepare what some tests need, such as compilers and pip; ports for services."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.paths import ROOT


class Missing(Exception):
    """What a test needs is not there; the message says what is missing and how to get it."""


def output_of(command: Sequence[str | Path]) -> str:
    """What a command prints; raises if it fails."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Missing(f"{command[0]} does not start ({error.strerror})") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Missing(f"got exit code {done.returncode} from `{' '.join(map(str, command[:4]))} …` ({reason})")
    return done.stdout


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def install(folder: Path, *arguments: str) -> None:
    """Install wheels in a folder, in the versions of constraints.txt."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--only-binary=:all:"]
    output_of([*pip, "-c", ROOT / "constraints.txt", "--target", folder, *arguments])
