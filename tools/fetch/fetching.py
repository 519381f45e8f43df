"""Fetching: make a folder a verified copy of the bundle at an address."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

from spaceport.exporter.atomic_folder import check_target, locked, publish, require_space
from spaceport.graphs.contract.ed25519 import MAX_KEY_BYTES, SIGNATURE_FILE, SIGNER_FILE, read_public_key
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import (
    ACCURACY_FILE,
    ENGINES_FOLDER,
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    manifest_in,
    record_of,
)
from spaceport.runtime.backends.private_files import problem_of
from spaceport.runtime.bundle import LARGEST_MANIFEST, check_name, read_manifest
from spaceport.runtime.opened_files import BundleError, OpenedFiles
from spaceport.tools.fetch.sources import FetchError, FetchSource, open_source

MOST_CONNECTIONS = 64
PART = 16 * 2**20  # bytes that are asked for at once
_PAUSES = (0.5, 1.0, 2.0)  # seconds between attempts to read a part
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Files that no manifest lists, each with its maximum size in bytes: who signed, and the result of `spaceport check`.
_SIGNATURE = {SIGNATURE_FILE: 2**10, SIGNER_FILE: MAX_KEY_BYTES}
_UNLISTED = {**_SIGNATURE, ACCURACY_FILE: LARGEST_MANIFEST}


@dataclass(frozen=True)
class _Part:
    name: str
    record: FileRecord
    start: int
    stop: int


def _transfer(
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


def _is_complete(file: Path, record: FileRecord) -> bool:
    """Whether a file has the recorded size and content."""
    if not file.is_file() or file.stat().st_size != record.size:
        return False
    with file.open("rb") as stream:
        return record_of(stream) == record


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


def _read_part(source: FetchSource, name: str, start: int, stop: int) -> bytes:
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
        content = _read_part(source, part.name, part.start, part.stop)
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
            with file.open("rb") as stream:
                while block := stream.read(2**20):
                    self._hasher.update(block)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(file, flags, 0o666), "ab")


@contextmanager
def _locked_partial(target: Path, small: Collection[str], on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """The partial folder of a target, with what an interrupted attempt left there.

    Other processes that fetch to the same target wait. It is removed if the block ends well, or has left nothing but
    files with the names `small`.
    """
    partial = target.with_name(f".{target.name}.fetch")
    while True:
        partial.mkdir(mode=0o755, exist_ok=True)
        if (problem := problem_of(partial)) is not None and os.path.lexists(partial):
            raise FetchError(f"{problem}; remove it, or choose another folder")
        with ExitStack() as locks:
            try:
                descriptor = locks.enter_context(locked(partial, on_wait))
            except FileNotFoundError:  # another process has published it meanwhile
                continue
            if not _is_at(descriptor, partial):
                continue
            try:
                yield partial
            except BaseException:
                if all(path.name in small for path in partial.rglob("*")):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            if _is_at(descriptor, partial):  # else it is at the target now
                shutil.rmtree(partial, ignore_errors=True)
            return


def _keep_listed(partial: Path, files: Mapping[str, FileRecord]) -> None:
    """Remove what an earlier attempt left of files that the manifest does not list, or lists with another content."""
    try:
        before: Mapping[str, FileRecord] = manifest_in((partial / MANIFEST_FILE).read_bytes()).files
    except (OSError, ValueError, RecursionError):
        before = {}
    kept = {partial / name for name, record in files.items() if before.get(name) == record}
    for path in sorted(partial.rglob("*"), reverse=True):  # the content of a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept or path.is_symlink():
            path.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a locked folder is still the one at the path, and not one that another process has published."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class _EarlierBundle:
    """A folder, and those of its files that have the recorded content."""

    files: OpenedFiles | None  # None: there is no folder
    verified: frozenset[str]

    def copied(self, name: str, folder: Path) -> bool:
        """Whether it has a file, which then has been copied to the folder."""
        if self.files is None or name not in self.verified:
            return False
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"/dev/fd/{self.files.descriptor(name)}").open("rb") as stream, copy.open("wb") as target:
            shutil.copyfileobj(stream, target, 2**20)
        return True

    def has_same(self, folder: Path, names: Iterable[str]) -> bool:
        """Whether these files are the same as in another folder, or in neither."""
        if self.files is None:
            return False
        return all(_content(self.files.path / name) == _content(folder / name) for name in names)


@contextmanager
def _earlier_bundle(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[_EarlierBundle]:
    """What a folder has of these files, each verified; none if there is no folder."""
    if not folder.is_dir():
        yield _EarlierBundle(None, frozenset())
        return
    opened = OpenedFiles(folder)
    try:
        verified = set()
        for name, record in files.items():
            with suppress(BundleError):
                opened.verify(name, record)
                verified.add(name)
        yield _EarlierBundle(opened, frozenset(verified))
    finally:
        opened.close()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class FetchReport:
    """What was done to make a folder a copy of a bundle."""

    folder: str
    total_bytes: int  # size of all files that the manifest lists
    fetched_bytes: int  # read from the address
    unchanged: bool  # whether the folder was a copy before
    seconds: float

    @property
    def reused_bytes(self) -> int:
        """Size of what the folder's earlier bundle had, or an interrupted attempt had left."""
        return self.total_bytes - self.fetched_bytes

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {**asdict(self), "reused_bytes": self.reused_bytes}


def fetch(
    address: str,
    folder: Path,
    *,
    overwrite: bool = False,
    require_signature: Path | None = None,
    engines: bool = False,
    connections: int = 8,
    on_stage: Callable[[str], None] = lambda _: None,
) -> FetchReport:
    """Make a folder a verified copy of the bundle at an address.

    The manifest is read first, then the files that it lists. The folder is replaced in one step when all of them are
    verified. Files that its earlier bundle has are copied from there.

    - `address`: `https://…`, an object store such as `s3://…`, or a folder.
    - `overwrite`: Whether an existing bundle with other content is replaced; default False.
    - `require_signature`: Public key file: the manifest must have a signature of this key; default None.
    - `engines`: Whether engines are fetched too; default False.
    - `connections`: Number of parts that are read at a time; default 8.
    """
    started = perf_counter()
    if not 1 <= connections <= MOST_CONNECTIONS:
        raise OptionFault(f"connections is {connections}: expected 1 to {MOST_CONNECTIONS}")
    if require_signature is not None:
        read_public_key(require_signature)  # raises before anything is read
    source, target = open_source(address), folder.absolute()
    check_target(target, overwrite=True)

    def on_wait() -> None:
        on_stage("waiting for another process that fetches to this folder")

    with _locked_partial(target, (MANIFEST_FILE, *_UNLISTED), on_wait) as partial:
        on_stage("reading the manifest")
        manifest = _manifest_at(source, address.rstrip("/"), partial, require_signature)
        files = _files_of(manifest, engines)
        on_stage("verifying the files that are there")
        with _earlier_bundle(target, files) as earlier:
            unchanged = len(earlier.verified) == len(files) and earlier.has_same(partial, (MANIFEST_FILE, *_SIGNATURE))
            fetched = 0
            if not unchanged:
                check_target(target, overwrite)
                fetched = _fill(source, partial, files, earlier, connections, on_stage)
                publish(partial, target)
    total = sum(record.size for record in files.values())
    return FetchReport(str(folder), total, fetched, unchanged, perf_counter() - started)


def _manifest_at(source: FetchSource, address: str, partial: Path, key: Path | None) -> Manifest:
    """The manifest at an address, which is put into the partial folder with the files that no manifest lists.

    Its signature is verified before it is parsed.
    """
    bounds = {MANIFEST_FILE: LARGEST_MANIFEST, **_UNLISTED}
    small = {
        name: content for name, most in bounds.items() if (content := _small(source, address, name, most)) is not None
    }
    if MANIFEST_FILE not in small:
        raise FetchError(f"{address}: no {MANIFEST_FILE} there: expected the address of a bundle's folder")
    with tempfile.TemporaryDirectory(prefix="spaceport-fetch-") as checked:
        _write(Path(checked), small)
        try:
            manifest = read_manifest(Path(checked), require_signature=key)
        except BundleError as error:
            raise type(error)(str(error).replace(checked, address)) from error
    _keep_listed(partial, manifest.files)
    _write(partial, small)
    return manifest


def _small(source: FetchSource, address: str, name: str, most: int) -> bytes | None:
    """The content of a small file; None if there is none."""
    try:
        content = _read_part(source, name, 0, most + 1)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        if name != MANIFEST_FILE:  # object stores answer so for files that do not exist if they may not be listed
            return None
        raise FetchError(f"{address}/{name}: {error.strerror}: expected credentials that may read it") from error
    if len(content) > most:
        raise FetchError(f"{address}/{name}: more than {most} bytes: expected at most {most}")
    return content


def _write(folder: Path, small: Mapping[str, bytes]) -> None:
    for name, content in small.items():
        (folder / name).write_bytes(content)


def _files_of(manifest: Manifest, engines: bool) -> dict[str, FileRecord]:
    """The files to read, small ones first, so that most errors come early."""
    found = dict(manifest.files)
    if engines:
        found |= {f"{ENGINES_FOLDER}/{name}": record.file for name, record in manifest.engines.items()}
    for name in found:
        check_name(Path(MANIFEST_FILE), name)
        if name in (MANIFEST_FILE, *_UNLISTED):
            raise FetchError(f"the manifest lists {name}, which no manifest can list: export the checkpoint again")
    return dict(sorted(found.items(), key=lambda item: item[1].size))


def _fill(
    source: FetchSource,
    partial: Path,
    files: Mapping[str, FileRecord],
    earlier: _EarlierBundle,
    connections: int,
    on_stage: Callable[[str], None],
) -> int:
    """Complete the partial folder; returns the number of bytes that were read from the source."""
    there = sum(file.stat().st_size for name in files if (file := partial / name).is_file())
    require_space(partial, sum(record.size for record in files.values()) - there)
    missing = {name: record for name, record in files.items() if not _is_complete(partial / name, record)}
    missing = {name: record for name, record in missing.items() if not earlier.copied(name, partial)}
    return _transfer(
        source, partial, missing, connections, lambda name: on_stage(f"fetching {name} ({files[name].size:,} bytes)")
    )
