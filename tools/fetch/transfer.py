"""Transfer: files from a source into a folder, in parallel parts that are verified in order while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spaceport.graphs.contract.manifest import FileRecord
from spaceport.tools.fetch.sources import FetchError, FetchSource

PART = 16 * 2**20  # bytes that are asked for at once
_PAUSES = (0.5, 1.0, 2.0)  # seconds between attempts to read a part
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Part:
    name: str
    record: FileRecord
    start: int
    stop: int


def transfer(
    source: FetchSource,
    folder: Path,
    files: Mapping[str, FileRecord],
    connections: int,
    on_file: Callable[[str], None] = lambda _: None,
) -> int:
    """Read files into a folder; returns the number of bytes read.

    What the folder has of a file already is its beginning, and is not read again. At most `2 * connections` parts are in
    memory. A file whose content is not the recorded one is removed, and named in the error.
    """
    waiting: deque[tuple[_Part, Future[bytes]]] = deque()
    received = 0
    with ThreadPoolExecutor(connections, thread_name_prefix="fetch") as pool:
        writer = _Writer(folder, on_file)
        try:
            for part in _parts(folder, files):
                waiting.append((part, pool.submit(_read, source, part)))
                if len(waiting) == 2 * connections:
                    received += writer.write(*_first(waiting))
            while waiting:
                received += writer.write(*_first(waiting))
        finally:
            writer.close()
            pool.shutdown(cancel_futures=True)
    return received


def is_complete(file: Path, record: FileRecord) -> bool:
    """Whether a file has the recorded size and content."""
    if not file.is_file() or file.stat().st_size != record.size:
        return False
    hasher = hashlib.sha256()
    _hash_file(hasher, file)
    return hasher.hexdigest() == record.sha256


def _parts(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[_Part]:
    """The missing parts of files, in the order in which they are written; an empty file has one."""
    for name, record in files.items():
        file = folder / name
        start = file.stat().st_size if file.is_file() else 0
        if start >= record.size:
            file.unlink(missing_ok=True)
            start = 0
        for first in range(start, max(record.size, 1), PART):
            yield _Part(name, record, first, min(record.size, first + PART))


def _first(waiting: deque[tuple[_Part, Future[bytes]]]) -> tuple[_Part, bytes]:
    part, content = waiting.popleft()
    return part, content.result()


def read_part(source: FetchSource, name: str, start: int, stop: int) -> bytes:
    """What a source has of a part of a file; errors that may pass are tried again."""
    for pause in _PAUSES:
        try:
            return source.read(name, start, stop)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(pause)
    try:
        return source.read(name, start, stop)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise FetchError(
            f"{name}: {error}: tried {len(_PAUSES) + 1} times; fetch again to go on where it ended"
        ) from error


def _read(source: FetchSource, part: _Part) -> bytes:
    """A whole part of a file that a manifest lists."""
    if part.start == part.stop:
        return b""
    try:
        content = read_part(source, part.name, part.start, part.stop)
    except (FileNotFoundError, PermissionError) as error:
        raise FetchError(f"{part.name}: {error.strerror}: the manifest lists it: upload the bundle again") from error
    if len(content) != part.stop - part.start:
        raise FetchError(
            f"{part.name}: ends after {part.start + len(content)} bytes, the manifest says {part.record.size}: "
            "upload the bundle again"
        )
    return content


class _Writer:
    """Writes the parts of one file after the other."""

    def __init__(self, folder: Path, on_file: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_file = on_file
        self._stream: BinaryIO | None = None
        self._hasher = hashlib.sha256()

    def write(self, part: _Part, content: bytes) -> int:
        """Append a part to its file, and verify the file after its last part; returns the number of bytes."""
        file = self._folder / part.name
        try:
            if self._stream is None:
                self._stream = self._begin(file, part.start)
                self._on_file(part.name)
            self._hasher.update(content)
            self._stream.write(content)
            if part.stop == part.record.size:
                self.close()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            reason = (
                f"{error.strerror}: free some space or choose another disk, then fetch again to go on where it ended"
            )
            raise OSError(error.errno, reason, str(file)) from error
        if part.stop == part.record.size and (found := self._hasher.hexdigest()) != part.record.sha256:
            file.unlink()
            raise FetchError(
                f"{part.name}: sha256 is {found[:12]}…, the manifest says {part.record.sha256[:12]}…: it was damaged, or "
                "another version was uploaded meanwhile; fetch again, or upload the bundle again"
            )
        return len(content)

    def close(self) -> None:
        """Close the current file; what it has stays for the next attempt."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _begin(self, file: Path, start: int) -> BinaryIO:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._hasher = hashlib.sha256()
        if start:
            _hash_file(self._hasher, file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(file, flags, 0o666), "ab")


def _hash_file(hasher: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            hasher.update(block)
