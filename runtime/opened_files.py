"""A bundle's files, read through the descriptors with which they were verified."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import FileRecord

AGAIN = "copy the bundle again or export it again"
_OWN_DESCRIPTORS = Path("/proc/self/fd")  # Linux; elsewhere libraries get the folder's path
_NO_LINKS = "copy the bundle with its links resolved (cp -rL), or allow links (--allow-links, allow_links=True)"
_HARD_LINKS = (
    "has {} hard links: the same file has another name, which another user or a store without duplicates may have "
    "created, and through which it can be changed; copy the bundle (cp -r), or allow links (--allow-links, allow_links=True)"
)


# What a file system says about a file's content: device, inode, size, and the times of the last changes of the content and
# of content or metadata, which programs cannot set.
_Stamp = tuple[int, int, int, int, int]


class BundleError(InputFault):
    """A folder is not a bundle, or its files changed after the export; the message says what to do."""


class ChangedWhileOpening(BundleError):
    """A file was changed or replaced while the bundle was opened: opening it again may succeed."""


class _Opened(NamedTuple):
    descriptor: int
    record: FileRecord
    stamp: _Stamp


class OpenedFiles:
    """The folder of a bundle and those of its files that were verified, all open until the object is released."""

    def __init__(self, path: Path, links: bool = False) -> None:
        self.path = path
        self.links = links  # whether files may have several names
        self._files: dict[str, _Opened] = {}
        self._changed: BundleError | None = None
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._folder = self._held(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    @property
    def location(self) -> str:
        """A path of this folder for libraries, which stays the same folder if another one is moved to its path."""
        own = _OWN_DESCRIPTORS / str(self._folder)
        return str(own if own.exists() else self.path)

    @property
    def replaced(self) -> bool:
        """Whether another folder is at the path now."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._folder))
        except OSError:
            return False

    def first_bytes(self, name: str, most: int) -> bytes:
        """The content of a file that no manifest records, such as the manifest; raises if it is longer than `most`."""
        with self._opened(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > most:
                raise BundleError(f"{self.path / name}: {size} bytes: expected at most {most}")
            return b"".join(_blocks(descriptor, most))

    def verify(self, name: str, record: FileRecord) -> None:
        """Open a file for good, if it has the recorded size and SHA-256."""
        with self._opened(name) as descriptor:
            stamp = _stamp(os.fstat(descriptor))
            self._require(name, record, descriptor)
            if _stamp(os.fstat(descriptor)) != stamp:
                raise ChangedWhileOpening(f"{self.path / name}: was changed while it was read: {AGAIN}")
            self._files[name] = _Opened(self._held(os.dup(descriptor)), record, stamp)

    def read(self, name: str) -> bytes:
        """The content of a verified file; raises if it is no longer what was verified."""
        opened = self._files[name]
        return self._exact(name, opened.record, opened.descriptor)

    def read_recorded(self, name: str, record: FileRecord) -> bytes:
        """The content of a file that was not verified when the bundle was opened."""
        with self._opened(name) as descriptor:
            return self._exact(name, record, descriptor)

    def descriptor(self, name: str) -> int:
        """The descriptor of a verified file."""
        return self._files[name].descriptor

    def require_same(self, name: str) -> None:
        """Raise if a library that opened a file by its name may have found another content than the verified one."""
        opened = self._files[name]
        try:
            named = os.stat(name, dir_fd=self._folder, follow_symlinks=self.links)
        except OSError as error:
            raise ChangedWhileOpening(f"{self.path / name}: {error.strerror}: open the bundle again") from error
        if _stamp(named) != opened.stamp or _stamp(os.fstat(opened.descriptor)) != opened.stamp:
            raise ChangedWhileOpening(f"{self.path / name}: was changed or replaced while it was opened: open it again")

    def has_stamp(self, name: str) -> bool:
        """Whether the metadata of a verified file says that it has not changed."""
        opened = self._files[name]
        return self._changed is None and _stamp(os.fstat(opened.descriptor)) == opened.stamp

    def require_unchanged(self, name: str) -> None:
        """Raise if a verified file has other content now; after a change of its metadata only, it is hashed again."""
        if self.has_stamp(name):
            return
        opened = self._files[name]
        with self._lock:
            stamp = _stamp(os.fstat(opened.descriptor))
            if self._changed is None and stamp != self._files[name].stamp:
                try:
                    self._require(name, opened.record, opened.descriptor)
                except BundleError as error:
                    self._changed = error
                self._files[name] = opened._replace(stamp=stamp)
            if self._changed is not None:
                raise BundleError(
                    f"{self._changed}; it was changed while the runtime used it: close the runtime, or open bundles that "
                    "may change with copy_weights=True"
                )

    def close(self) -> None:
        """Close the folder and its files; done by itself when the object is released."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __del__(self) -> None:
        self.close()

    def _held(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor

    def _exact(self, name: str, record: FileRecord, descriptor: int) -> bytes:
        """The content of a file, which is exactly the recorded one."""
        content = b"".join(_blocks(descriptor, record.size + 1))
        self._compare(name, record, len(content), hashlib.sha256(content).hexdigest())
        return content

    def _require(self, name: str, record: FileRecord, descriptor: int) -> None:
        """Raise unless a file has the recorded size and SHA-256."""
        size, hasher = os.fstat(descriptor).st_size, hashlib.sha256()
        for block in _blocks(descriptor, size + 1) if size == record.size else ():
            hasher.update(block)
        self._compare(name, record, size, hasher.hexdigest())

    def _compare(self, name: str, record: FileRecord, size: int, sha256: str) -> None:
        file = self.path / name
        if size != record.size:
            raise BundleError(f"{file}: {size} bytes, the manifest says {record.size}: {AGAIN}")
        if sha256 != record.sha256:
            raise BundleError(f"{file}: sha256 is {sha256[:12]}…, the manifest says {record.sha256[:12]}…: {AGAIN}")

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A descriptor of a regular file below the folder; FIFOs and devices are refused without waiting for them."""
        file = self.path / name
        try:
            descriptor = self._open(name)
        except OSError as error:
            denied = error.errno in (errno.EACCES, errno.EPERM)
            advice = "expected a readable file" if denied else AGAIN
            raise BundleError(f"{file}: {error.strerror}: {advice}") from error
        try:
            self.check_status(file, os.fstat(descriptor))
            yield descriptor
        except OSError as error:
            raise BundleError(f"{file}: {error.strerror}: expected a readable file") from error
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        follow = 0 if self.links else os.O_NOFOLLOW
        *folders, last = PurePosixPath(name).parts
        current = os.dup(self._folder)
        try:
            for part in folders:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=current)
                os.close(current)
                current = inner
            status = os.stat(last, dir_fd=current, follow_symlinks=self.links)
            self.check_status(self.path / name, status)  # before it is opened: devices may act when they are opened
            return os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow, dir_fd=current)
        finally:
            os.close(current)

    def check_status(self, file: Path, status: os.stat_result) -> None:
        """Raise for anything but a regular file, and for files with several names unless these are allowed."""
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{file}: not a regular file: {_NO_LINKS}")
        if status.st_nlink > 1 and not self.links:  # 0: it was removed since it was opened
            raise BundleError(f"{file}: {_HARD_LINKS.format(status.st_nlink)}")


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _blocks(descriptor: int, most: int) -> Iterator[bytes]:
    """The first bytes of a file, at most `most`, whatever position the descriptor has."""
    start = 0
    while start < most and (block := os.pread(descriptor, min(2**20, most - start), start)):
        yield block
        start += len(block)
