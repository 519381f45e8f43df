"""Trust: the list of engines built on this machine; others run only with `trust_engines`, since engines are code."""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "built-engines"
_NOWHERE = Path(os.devnull)  # not a folder: reading and writing below it fails


def remember(sha256: str) -> bool:
    """Record that an engine was built here; returns whether that was possible."""
    if built_here(sha256):
        return True
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a") as stream:  # one short line is appended atomically
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
    """The folder for this user's state."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError:  # the user has no home folder
            state = _NOWHERE
    return state / "spaceport"


def _file() -> Path:
    return state_folder() / _FILE
