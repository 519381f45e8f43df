"""Private files: small files of this user's state, which no other user can have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from spaceport.graphs.contract.atomic_file import replace_bytes

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # neither links nor, without waiting, FIFOs
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NOWHERE = Path(os.devnull)  # not a folder: reading and writing below it fails


def state_folder() -> Path:
    """The folder for this user's state."""
    return _user_folder("XDG_STATE_HOME", ".local/state") / "spaceport"


def cache_folder() -> Path:
    """The folder with this user's measurements."""
    return _user_folder("XDG_CACHE_HOME", ".cache") / "spaceport" / "step-costs"


def _user_folder(variable: str, below_home: str) -> Path:
    folder = Path(os.environ.get(variable, ""))
    if folder.is_absolute():
        return folder
    try:
        return Path.home() / below_home
    except RuntimeError:  # the user has no home folder
        return _NOWHERE


def read_private(file: Path, most: int = -1) -> bytes | None:
    """The content of a file that belongs to this user alone, or its first `most` bytes; None if there is no such file."""
    try:
        with _private_file(file, os.O_RDONLY, "rb") as stream:
            content: bytes = stream.read(most)
            return content
    except OSError:
        return None


def append_private(file: Path, content: bytes) -> None:
    """Append to a file that belongs to this user alone, and create it and its folder; raises OSError otherwise."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _private_file(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab") as stream:
        stream.write(content)  # one short line is appended atomically


def replace_private(file: Path, content: bytes) -> None:
    """Replace a file in one step, or create it and its folder, for this user alone; raises OSError otherwise."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _private_folder(file.parent):
        # with a umask of 002, a file that others may write would not be read again
        replace_bytes(file, content, mode=0o600)


def problem_of(folder: Path) -> str | None:
    """Why a folder that exists is not used for this user's state; None if it is used."""
    if not os.path.lexists(folder):
        return None
    try:
        with _private_folder(folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}: expected a folder of this user that no other user may write to"


@contextmanager
def _private_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, _FOLDER)
    try:
        _require_private(os.fstat(descriptor), stat.S_ISDIR)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _private_file(file: Path, flags: int, mode: str) -> Iterator[IO[Any]]:
    with _private_folder(file.parent) as folder:
        descriptor = os.open(file.name, flags | _FILE, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, mode) as stream:
            _require_private(os.fstat(descriptor), stat.S_ISREG)
            yield stream


def _require_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode):
        raise PermissionError(1, "not a regular file")
    if status.st_uid != os.geteuid():
        raise PermissionError(1, "it belongs to another user")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(1, "other users may write to it")
