"""Atomic file: replace a file in one step, so that readers see the old content or the new content."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME_BYTES = 100  # of the target's name in the name of its temporary file; file systems allow 255 bytes per name


def replace_text(target: Path, text: str, durable: bool = False) -> None:
    """Replace a file with this text in UTF-8, without converting line ends."""
    replace_bytes(target, text.encode(), durable)


def replace_bytes(target: Path, content: bytes, durable: bool = False, mode: int | None = None) -> None:
    """Replace a file with these bytes; with `durable`, content and rename are flushed to the disk."""
    try:
        with staged(target, content, durable, mode) as commit:
            commit()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = f"{error.strerror}: {len(content):,} bytes are needed, free some space"
        raise OSError(error.errno, needed, str(target)) from error


@contextmanager
def staged(
    target: Path, content: bytes | memoryview, durable: bool = False, mode: int | None = None
) -> Iterator[Callable[[], None]]:
    """Content in a temporary file; calling the yielded function replaces the target with it.

    If the function is not called, the temporary file is removed. Several files can so be written first, which may fail,
    and then replaced together.
    """
    sweep(target)
    partial = partial_of(target)

    def replace() -> None:
        partial.replace(target)
        if durable:
            flush(target.parent)

    try:
        with partial.open("wb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        yield replace
    finally:
        partial.unlink(missing_ok=True)


def partial_of(target: Path) -> Path:
    """The path beside a target where this thread writes the temporary file or folder that will replace it."""
    return target.with_name(f"{_prefix(target)}{os.getpid()}-{threading.get_ident()}")


def is_partial(path: Path) -> bool:
    """Whether a path is named like one of `partial_of`."""
    return re.fullmatch(r"\..+\.partial-.+-\d+-\d+", path.name) is not None


def partials_of(target: Path) -> list[tuple[Path, int]]:
    """The temporary files and folders of a target that are there, each with the process on this machine that made it."""
    name = re.compile(re.escape(_prefix(target)) + r"(\d{1,9})-\d+")
    matches = [(path, name.fullmatch(path.name)) for path in target.parent.iterdir()]
    return [(path, int(match[1])) for path, match in matches if match]


def sweep(target: Path) -> None:
    """Remove the temporary files and folders of a target whose writing processes on this machine no longer run."""
    own = partial_of(target)
    with suppress(OSError):  # leftovers do no harm
        for path, process in partials_of(target):
            if path == own or not _is_alive(process):
                _remove(path)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's directory entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(target: Path) -> str:
    """Prefix of the temporary names of a target; it names this machine, since other machines may share the folder."""
    name = os.fsencode(target.name)[:_NAME_BYTES].decode("utf-8", "ignore")  # without a truncated character
    return f".{name}.partial-{platform.node()}-"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
