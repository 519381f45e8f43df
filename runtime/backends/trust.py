"""Trust: the engines that were built on this machine; any other is code of strangers and runs only if it is said to."""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "built-engines"
_NOWHERE = Path(os.devnull)  # nothing can be read or written below it


def remember(sha256: str) -> bool:
    """Note that an engine was built here; whether that could be noted."""
    if built_here(sha256):
        return True
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a") as stream:  # one short line: written in one piece, whoever else writes
            stream.write(f"{sha256}\n")
    except OSError:
        return False
    return True


def built_here(sha256: str) -> bool:
    """Whether an engine was built on this machine by this user."""
    try:
        return sha256 in _file().read_text("ascii", "replace").splitlines()
    except OSError:
        return False


def state_folder() -> Path:
    """Where this user's machine keeps what it knows of engines."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError:  # the machine knows no name of this user
            state = _NOWHERE
    return state / "spaceport"


def _file() -> Path:
    return state_folder() / _FILE
