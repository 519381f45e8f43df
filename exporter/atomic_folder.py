"""Atomic folder: write a folder beside its target and rename it to the target in one step when it is complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from spaceport.exporter.checkpoint_files import BASE_FILE
from spaceport.exporter.folder_lock import locked_folder
from spaceport.exporter.interrupts import interrupts_deferred
from spaceport.graphs.contract.atomic_file import flush, partial_of, sweep
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2
_CURRENT_FOLDER = -100  # AT_FDCWD


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that may be overwritten: its name for messages, and a file by which it is recognized."""

    noun: str
    marker: str


BUNDLE = FolderKind("bundle", MANIFEST_FILE)
CHECKPOINT = FolderKind("checkpoint", "config.json")
ADAPTER_FOLDER = FolderKind("trained adapter", BASE_FILE)


class TargetError(InputFault):
    """A folder cannot be written to the requested path; nothing was changed there."""


def check_target(target: Path, overwrite: bool, kind: FolderKind = BUNDLE) -> None:
    """Raise if a folder cannot be written to `target`; called before any other work."""
    parent = target.absolute().parent
    if not parent.is_dir():
        raise TargetError(f"{parent}: no such folder: create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"{parent}: no permission to write in it: choose another folder for the {kind.noun}")
    _try_to_create(target.absolute(), kind)
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise TargetError(f"{target}: exists and is not a folder: choose another name")
    if not (target / kind.marker).exists() and any(target.iterdir()):
        raise TargetError(
            f"{target}: contains files but no {kind.noun}: choose another name, these files would be lost"
        )
    if not overwrite and any(target.iterdir()):
        raise TargetError(f"{target}: a {kind.noun} exists there: replace it with --overwrite")


def _try_to_create(target: Path, kind: FolderKind) -> None:
    """Raise if a folder beside the target cannot be created, or the target's name is not possible."""
    partial = partial_of(target)
    try:
        with suppress(FileNotFoundError):
            os.lstat(target)
        with suppress(FileExistsError):  # the target is being written
            partial.mkdir()
            partial.rmdir()
    except OSError as error:
        raise TargetError(
            f"{target}: {error.strerror}: choose another folder for the {kind.noun}, or another name"
        ) from error


@contextmanager
def writing(target: Path, overwrite: bool, kind: FolderKind = BUNDLE) -> Iterator[Path]:
    """A new folder that replaces the target when the block ends without an error, and is removed otherwise."""
    check_target(target, overwrite, kind)
    target = target.absolute()
    sweep(target)
    partial = partial_of(target)
    try:
        partial.mkdir()
        yield partial
        check_target(target, overwrite, kind)  # again: the target may have changed in the meantime
        publish(partial, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        reason = f"{error.strerror} after {written:,} bytes: free some space or choose another disk for the {kind.noun}"
        raise OSError(error.errno, reason, str(target)) from error
    finally:
        with interrupts_deferred():  # `partial` is now the incomplete folder, or the old one
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new folder beside a path, with a temporary name; it is removed when the block ends."""
    sweep(target.absolute())
    folder = partial_of(target.absolute())
    try:
        folder.mkdir()
        yield folder
    finally:
        with interrupts_deferred():
            shutil.rmtree(folder, ignore_errors=True)


def require_space(folder: Path, size: int, kind: FolderKind = BUNDLE) -> None:
    """Raise if the disk has less than `size` free bytes."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetError(
            f"{folder}: {free / 1e6:.0f} MB free, the {kind.noun} needs about {size / 1e6:.0f} MB: free some space or choose another disk"
        )


def _target_locked(target: Path) -> AbstractContextManager[object]:
    """Lock an existing target: wait until a build that stores an engine in it has finished."""
    return locked_folder(target) if target.exists() else nullcontext()


def publish(partial: Path, target: Path) -> None:
    """Move a complete folder to the target, so that the old or the new folder exists there at every moment.

    The old folder is removed, locked until then: it is at the path of the new one for a moment.
    """
    with _target_locked(target), interrupts_deferred():
        if _move(partial, target):
            shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, target: Path) -> bool:
    """Move a folder to the target; returns whether the old one is at its path now.

    If not, another process may have begun a folder there already.
    """
    exchanged = False
    if not target.exists() or not any(target.iterdir()):
        partial.rename(target)
    elif not (exchanged := _exchange(partial, target)):
        old = partial.with_name(partial.name + "-old")
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    flush(target.parent)
    return exchanged


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False if the system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
