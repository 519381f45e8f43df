"""Cache: what tests build once for many runs, found by a hash of everything that it is made from."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path

from support.paths import ROOT

# Not SPACEPORT_…: commands warn of variables with that prefix that they do not know.
FOLDER = "TESTED_SPACEPORT_CACHE"
EXPORTER = ("exporter", "graphs", "kernels")  # packages that write bundles
MOST_BYTES = 2_000_000_000
RECENT = 3600.0  # seconds in which an entry that was used is not removed

# Set here and not where it is read, so that test processes have it although the tests hide the user's cache.
_USERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spaceport-tests"
os.environ.setdefault(FOLDER, os.environ.pop("SPACEPORT_TEST_CACHE", str(_USERS)))

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "safetensors", "tokenizers")


def built(
    name: str, made_from: Iterable[object], make: Callable[[Path], object], sources: Iterable[str] = EXPORTER
) -> Path:
    """The folder that `make` has written, in this run or an earlier one, from the same things with the same sources.

    Sources are Python files, and folders of them. The folder is read-only: a test that changes it works on a copy.
    """
    files = [(str(file.relative_to(ROOT)), file) for source in sources for file in files_of(ROOT / source, "*.py")]
    digest = digest_of((*made_from, files, libraries()))
    target = cache_folder() / "built" / f"{name}-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = target.with_suffix(".json")
        if not record.exists():
            work = target.with_suffix(f".{os.getpid()}")
            for left in (work, target):
                shutil.rmtree(left, ignore_errors=True)
            make(work)
            work.rename(target)
            record.write_text(json.dumps(_listing(target)))
            _make_room(target.parent)
        elif json.loads(record.read_text()) != _listing(target):
            record.unlink()  # so that the next run builds it again
            raise AssertionError(f"{target}: a test has changed it, expected a test to change copies only")
        os.utime(record)
    return target


def cache_folder() -> Path:
    return Path(os.environ[FOLDER])


def libraries() -> list[str]:
    """The versions of Python and of the libraries that the results of tests depend on."""
    return [platform.python_version(), *(version(library) for library in _LIBRARIES)]


def digest_of(thing: object) -> str:
    """A hash of values; a path stands for the content of its file or folder."""
    digest = hashlib.sha256()
    _feed(digest, thing)
    return digest.hexdigest()[:24]


def files_of(path: Path, pattern: str = "*") -> list[Path]:
    """A file, or the files of a folder, without what Python has compiled."""
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and file.suffix not in (".pyc", ".so")]


def _feed(digest: hashlib._Hash, thing: object) -> None:
    digest.update(type(thing).__name__.encode() + b":")
    if isinstance(thing, Path):
        for file in files_of(thing):
            _feed(digest, str(file.relative_to(thing)))
            _feed(digest, file.read_bytes())
    elif isinstance(thing, tuple | list):
        for part in thing:
            _feed(digest, part)
    elif is_dataclass(thing):
        for field in fields(thing):
            _feed(digest, (field.name, getattr(thing, field.name)))
    else:
        content = thing if isinstance(thing, bytes) else repr(thing).encode()
        digest.update(b"%d " % len(content) + content)


def _listing(folder: Path) -> list[list[object]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [[str(file.relative_to(folder)), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


def _make_room(folder: Path) -> None:
    """Remove the entries that were not used for longest, and what killed processes have left."""
    now, total = time.time(), 0
    for record in sorted(folder.glob("*.json"), key=lambda record: -record.stat().st_mtime):
        total += sum(size for _, size, _ in json.loads(record.read_text()))
        if total > MOST_BYTES and now - record.stat().st_mtime > RECENT:
            record.unlink()
            shutil.rmtree(record.with_suffix(""))
    for left in folder.glob("*"):
        if left.is_dir() and not left.with_suffix(".json").exists() and now - left.stat().st_mtime > RECENT:
            shutil.rmtree(left, ignore_errors=True)
