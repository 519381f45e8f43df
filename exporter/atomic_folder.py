"""Write a folder beside its target, and rename it to the target in one step when it is complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spaceport.exporter.checkpoint_files import BASE_FILE
from spaceport.exporter.interrupts import interrupts_deferred
from spaceport.graphs.contract.atomic_file import flush, partial_of, partials_of, sweep
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, Manifest, manifest_content, record_of

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2
_CURRENT_FOLDER = -100  # AT_FDCWD
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP)  # errors of network file systems without folder locks


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


def _full_disk(error: Exception) -> int | None:
    """The number of the error if it says that the disk is full; that of NumPy's tofile and of safetensors have none."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error.errno
    hidden = re.fullmatch(r"\d+ requested and \d+ written", str(error)) or f"(os error {errno.ENOSPC})" in str(error)
    return errno.ENOSPC if hidden else None


@contextmanager
def writing(target: Path, overwrite: bool, kind: FolderKind = BUNDLE, needed: int = 0) -> Iterator[Path]:
    """A new folder that replaces the target when the block ends without an error, and is removed otherwise.

    `needed` are the bytes of the complete folder, 0 if that is unknown, for the error of a full disk.
    """
    check_target(target, overwrite, kind)
    target = target.absolute()
    # In the end `partial` is the incomplete folder, or the old one; its lock tells others that this process lives.
    with temporary_folder(target) as partial, locked(partial):
        try:
            yield partial
            check_target(target, overwrite, kind)  # again: the target may have changed in the meantime
            publish(partial, target)
        except Exception as error:
            if (reason := _full_disk(error)) is None:
                raise
            written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
            of = f" of about {needed:,}" if needed else ""
            advice = f"free some space or choose another disk for the {kind.noun}"
            raise OSError(
                reason, f"{os.strerror(reason)} after {written:,} bytes{of}: {advice}", str(target)
            ) from error


def refuse_while_written(target: Path) -> None:
    """Raise if another process is writing a bundle to `target`: one of the two would work in vain."""
    for partial, process in partials_of(target.absolute()):

        def refuse(process: int = process) -> None:
            raise TargetError(
                f"{target}: process {process} is writing a {BUNDLE.noun} there: wait until it has ended, or choose another name"
            )

        with suppress(FileNotFoundError), locked(partial, refuse):  # it may end in this moment
            pass


def require_space(folder: Path, size: int, kind: FolderKind = BUNDLE) -> None:
    """Raise if the disk has less than `size` free bytes."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetError(
            f"{folder}: {free / 1e6:.0f} MB free, the {kind.noun} needs about {size / 1e6:.0f} MB: free some space or choose another disk"
        )


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Lock a folder or file for the block and yield its descriptor; without effect on file systems that cannot lock it.

    `on_wait` is called if another process has the lock.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield descriptor
    finally:
        os.close(descriptor)


def publish(partial: Path, target: Path) -> None:
    """Move a complete folder to the target, so that the old or the new folder exists there at every moment.

    An existing target is locked: a build that stores an engine in it ends first. The lock is released when the old
    folder, which may be at the path of the new one for a moment, is removed.
    """
    with locked(target) if target.exists() else nullcontext(), interrupts_deferred():
        old = _replace(partial, target)
        flush(target.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _replace(partial: Path, target: Path) -> Path | None:
    """Move a folder to the target; returns where the old one is now."""
    if not target.exists() or not any(target.iterdir()):
        partial.rename(target)
        return None
    if _exchange(partial, target):
        return partial
    old = partial.with_name(partial.name + "-old")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    return old


def _exchange(partial: Path, target: Path) -> bool:
    """Swap two folders in one step; False if the system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_CURRENT_FOLDER, os.fsencode(partial), _CURRENT_FOLDER, os.fsencode(target), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with the digests of all files of a folder, and flush everything to the disk.

    The manifest is written last: a folder without it does not open."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            files[file.name] = record_of(stream)
        flush(file)
    complete = replace(manifest, files=files)
    path = folder / MANIFEST_FILE
    path.write_bytes(manifest_content(complete))
    flush(path)
    flush(folder)
    return complete
