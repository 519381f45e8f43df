"""Atomic folder: a folder that is written beside its target and put in its place in one step when it is complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from spaceport.exporter.folder_lock import locked_folder
from spaceport.exporter.interrupts import interrupts_deferred
from spaceport.graphs.contract.atomic_file import flush, partial_of, sweep
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2
_HERE = -100  # AT_FDCWD


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that may be replaced: its name for messages, and the file that every such folder has."""

    noun: str
    mark: str


BUNDLE = FolderKind("bundle", MANIFEST_FILE)


class TargetError(InputFault):
    """A folder cannot be written where it was asked for; nothing there was changed."""


def check_target(target: Path, overwrite: bool, kind: FolderKind = BUNDLE) -> None:
    """Raise if a folder could not be put at `target`, before any work is done for it."""
    parent = target.absolute().parent
    if not parent.is_dir():
        raise TargetError(f"{parent}: no such folder: make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"{parent}: no permission to write in it: choose another place for the {kind.noun}")
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise TargetError(f"{target}: exists and is not a folder: choose another name")
    if not (target / kind.mark).exists() and any(target.iterdir()):
        raise TargetError(f"{target}: holds files but no {kind.noun}: choose another name, it would be lost")
    if not overwrite and any(target.iterdir()):
        raise TargetError(f"{target}: a {kind.noun} is there already: say --overwrite to replace it")


@contextmanager
def writing(target: Path, overwrite: bool, kind: FolderKind = BUNDLE) -> Iterator[Path]:
    """A folder to fill; it takes the target's place when the block ends well, and is removed when it does not."""
    check_target(target, overwrite, kind)
    target = target.absolute()
    sweep(target)
    partial = partial_of(target)
    try:
        partial.mkdir()
        yield partial
        check_target(target, overwrite, kind)  # again: by now something else may stand there
        with _nobody_else_in(target), interrupts_deferred():
            _publish(partial, target)
    finally:
        with interrupts_deferred():  # by now `partial` is what came to nothing, or the old folder
            shutil.rmtree(partial, ignore_errors=True)


def require_space(folder: Path, size: int, kind: FolderKind = BUNDLE) -> None:
    """Raise if the disk has no room for `size` bytes more."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetError(
            f"{folder}: {free / 1e6:.0f} MB free, the {kind.noun} needs about {size / 1e6:.0f} MB: make room or choose another disk"
        )


def _nobody_else_in(target: Path) -> AbstractContextManager[object]:
    """Wait for whoever stores an engine there: what is written by then is the old folder's."""
    return locked_folder(target) if target.exists() else nullcontext()


def _publish(partial: Path, target: Path) -> None:
    """Put a whole folder in its place: at every moment the old folder or the new one is there."""
    if not target.exists() or not any(target.iterdir()):
        partial.rename(target)
    elif not _exchange(partial, target):
        old = partial.with_name(partial.name + "-old")
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    flush(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step where the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
