"""Atomic file: a file whose new content is written beside it and put in its place in one step."""

from __future__ import annotations

import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_NAME_BYTES = 100  # of a target's name that a partial name repeats: a file system allows 255 for the whole name


def replace_text(target: Path, text: str, durable: bool = False) -> None:
    """Replace a file by this text in UTF-8, its line ends as they are."""
    replace_bytes(target, text.encode(), durable)


def replace_bytes(target: Path, content: bytes | memoryview, durable: bool = False) -> None:
    """Replace a file by these bytes; a durable content is on the disk before and after it takes its place."""
    with staged(target, content, durable) as commit:
        commit()


@contextmanager
def replacing(target: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content replaces a file when the block ends well, and is removed when it does not."""
    with _partial_file(target) as partial:
        with partial.open("wb") as stream:
            yield stream
            _finish(stream, durable)
        _put(partial, target, durable)


@contextmanager
def staged(target: Path, content: bytes | memoryview, durable: bool = False) -> Iterator[Callable[[], None]]:
    """Content that waits beside a file until the yielded function is called; it is removed if that never happens.

    So several files can be written first, which may fail, and then all take their places.
    """
    with _partial_file(target) as partial:
        with partial.open("wb") as stream:
            stream.write(content)
            _finish(stream, durable)
        yield lambda: _put(partial, target, durable)


def partial_of(target: Path) -> Path:
    """The file or folder beside a target in which this thread prepares what will take its place."""
    return target.with_name(f"{_prefix(target)}{os.getpid()}-{threading.get_ident()}")


def is_partial(path: Path) -> bool:
    """Whether a name is one that `partial_of` gives."""
    return re.fullmatch(r"\..+\.partial-.+-\d+-\d+", path.name) is not None


def sweep(target: Path) -> None:
    """Remove the partial files and folders of a target whose writers were killed on this machine."""
    own = partial_of(target).name
    name = re.compile(re.escape(_prefix(target)) + r"(\d{1,9})(-\d+)?")  # earlier versions wrote no thread
    with suppress(OSError):  # what cannot be listed or removed is in nobody's way
        for path in target.parent.iterdir():
            found = name.fullmatch(path.name)
            if found and (path.name == own or not _is_alive(int(found[1]))):
                _remove(path)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _partial_file(target: Path) -> Iterator[Path]:
    sweep(target)
    partial = partial_of(target)
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _finish(stream: BinaryIO, durable: bool) -> None:
    stream.flush()
    if durable:
        os.fsync(stream.fileno())


def _put(partial: Path, target: Path, durable: bool) -> None:
    partial.replace(target)
    if durable:
        flush(target.parent)


def _prefix(target: Path) -> str:
    """What all partial names of a target on this machine begin with; other machines may share the folder."""
    name = os.fsencode(target.name)[:_NAME_BYTES].decode("utf-8", "ignore")  # no character cut in half
    return f".{name}.partial-{platform.node()}-"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
