"""Trust: the list of engines built on this machine; others run only with `trust_engines`, since engines are code."""

from __future__ import annotations

import os
from pathlib import Path

from spaceport.runtime.backends.private_files import append_private, read_private

_FILE = "built-engines"
_NOWHERE = Path(os.devnull)  # not a folder: reading and writing below it fails


def remember(sha256: str) -> bool:
    """Record that an engine was built here; returns whether that was possible."""
    if built_here(sha256):
        return True
    try:
        append_private(_file(), f"{sha256}\n".encode())
    except OSError:
        return False
    return True


def built_here(sha256: str) -> bool:
    """Whether an engine was built on this machine by this user."""
    content = read_private(_file())
    return content is not None and sha256 in content.decode("ascii", "replace").splitlines()


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
