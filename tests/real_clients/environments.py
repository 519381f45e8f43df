"""Environments: one for each tool, with the versions of its requirements file."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
_RECORD = "installed.txt"  # the requirements that an environment was made from
_TAIL = 3000  # characters of a failed command's output


class CommandFailed(RuntimeError):
    """A command of a tool failed or took too long; the message has the end of its output."""


def environment(name: str, work: Path) -> Path:
    """The folder of programs of a tool's environment, created unless it has the right versions."""
    folder, wanted = work / "environments" / name, (REQUIREMENTS / f"{name}.txt").read_text("utf-8")
    record = folder / _RECORD
    if not record.is_file() or record.read_text("utf-8") != wanted:
        venv.create(folder, with_pip=True, clear=True)
        run([str(folder / "bin" / "pip"), "install", "-q", "-r", str(REQUIREMENTS / f"{name}.txt")], work, 1200)
        record.write_text(wanted, "utf-8")
    return folder / "bin"


def version_of(name: str) -> str:
    """The version of a tool in its requirements file."""
    package = name.replace("-", "_").lower()
    lines = (REQUIREMENTS / f"{name}.txt").read_text("utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.lower().replace("-", "_").startswith(f"{package}=="))


def run(command: Sequence[str], folder: Path, seconds: float) -> str:
    """The output of a command in a folder; data sets are opened without network."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    own |= {"HF_HOME": str(folder / "cache"), "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "sk-none", "COLUMNS": "150"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=own, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{command[0]} took more than {seconds:g} s") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-_TAIL:]}")
    return done.stdout
