"""Cache: what tests build once for many runs, found by a hash of everything that it is made from, imports included."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from support.paths import PARTS, ROOT, TESTS

_SOURCES = {
    **dict.fromkeys(("support", "attack", "cpus", "real_clients", "stand_in_cuda"), TESTS),
    **dict.fromkeys(("benchmarks", "deploy", "recipes"), ROOT),
    "spaceport": ROOT / "src",
}


@cache
def imported(file: Path, everywhere: bool = False) -> tuple[frozenset[str], frozenset[Path]]:
    """The packages and the project's files that a file imports when it is imported, or `everywhere`: when it runs."""
    modules = list(_modules(ast.parse(file.read_text("utf-8")), everywhere))
    packages = frozenset(module.partition(".")[0] for module in modules)
    return packages, frozenset(below for module in modules for below in _files_of(module))


@cache
def needed_files(file: Path, everywhere: bool = False) -> frozenset[Path]:
    """A file and all of the project's files that it imports, directly or through others."""
    seen, waiting = {file}, [file]
    while waiting:
        _, below = imported(waiting.pop(), everywhere)
        waiting += below - seen
        seen |= below
    return frozenset(seen)


def _modules(tree: ast.Module, everywhere: bool) -> Iterator[str]:
    """The modules that a file imports, and the names that it takes from them."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not everywhere:
            continue  # runs later
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


@cache
def _files_of(module: str) -> frozenset[Path]:
    """The project's files that importing a module runs: its packages and itself."""
    folder = _SOURCES.get(module.partition(".")[0])
    if folder is None:
        return frozenset()
    names = module.split(".")
    path = (
        ROOT.joinpath(*names[1:])
        if names[0] == "spaceport" and names[1:2] and names[1] in PARTS
        else folder.joinpath(*names)
    )
    own = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return _files_of(module.rpartition(".")[0]).union(own)


# Not SPACEPORT_…: commands warn of variables with that prefix that they do not know.
FOLDER = "TESTED_SPACEPORT_CACHE"
NOTES = "TESTED_SPACEPORT_NOTES"  # folder for what the processes of one run tell at its end
MOST_BYTES = 2_000_000_000
RECENT = 3600.0  # seconds in which an entry that was used is not removed

# Set here and not where it is read, so that test processes have it although the tests hide the user's cache.
_USERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spaceport-tests"
os.environ.setdefault(FOLDER, os.environ.pop("SPACEPORT_TEST_CACHE", str(_USERS)))

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "safetensors", "tokenizers")


def built(name: str, made_from: Iterable[object], sources: Iterable[str], make: Callable[[Path], object]) -> Path:
    """The folder that `make` has written, in this run or an earlier one, from the same things with the same sources.

    It is read-only: a test that changes it works on a copy.
    """
    digest = digest_of((*made_from, sources_digest(*sources)))
    target = cache_folder() / "built" / f"{name}-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = target.with_suffix(".json")
        if not record.exists():
            _build(target, make)
            record.write_text(json.dumps(_listing(target)))
            _make_room(target.parent)
        elif json.loads(record.read_text()) != _listing(target):
            record.unlink()  # so that the next run builds it again
            raise AssertionError(f"{target}: a test has changed it, expected a test to change copies only")
        os.utime(record)
    return target


def cache_folder() -> Path:
    return Path(os.environ[FOLDER])


def sources_digest(*modules: str) -> str:
    """A hash of the modules, of everything of the project that they import, and of the versions of the libraries."""
    files = {file for module in modules for file in needed_files(ROOT / module, everywhere=True)}
    contents = [(str(file.relative_to(ROOT)), file.read_bytes()) for file in sorted(files)]
    return digest_of((contents, libraries()))


def libraries() -> list[str]:
    """The versions of Python and of the libraries that the results of tests depend on."""
    return [platform.python_version(), *(version(library) for library in _LIBRARIES)]


def digest_of(thing: object) -> str:
    """A hash of values; a path stands for the content of its file or folder."""
    digest = hashlib.sha256()
    _feed(digest, thing)
    return digest.hexdigest()[:24]


def _feed(digest: hashlib._Hash, thing: object) -> None:
    digest.update(type(thing).__name__.encode() + b":")
    if isinstance(thing, Path):
        for file in [thing] if thing.is_file() else sorted(file for file in thing.rglob("*") if file.is_file()):
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


def _build(target: Path, make: Callable[[Path], object]) -> None:
    work = target.with_suffix(f".{os.getpid()}")
    for left in (work, target):
        shutil.rmtree(left, ignore_errors=True)
    begin = time.process_time()
    make(work)
    work.rename(target)
    note(built=target.name, seconds=time.process_time() - begin)


def note(**entry: object) -> None:
    """Add a line to what the test processes tell at the end of this run."""
    if folder := os.environ.get(NOTES):
        with (Path(folder) / f"{os.getpid()}.notes").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _listing(folder: Path) -> list[list[object]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [[str(file.relative_to(folder)), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


def _make_room(folder: Path) -> None:
    """Remove the entries that were not used for longest, and what killed processes have left."""
    now = time.time()
    ages = {record: now - record.stat().st_mtime for record in folder.glob("*.json")}
    sizes = {record: sum(size for _, size, _ in json.loads(record.read_text())) for record in ages}
    total = sum(sizes.values())
    for record in sorted(ages, key=lambda record: -ages[record]):
        if total <= MOST_BYTES or ages[record] < RECENT:
            break
        record.unlink()
        shutil.rmtree(record.with_suffix(""))
        total -= sizes[record]
    for left in folder.glob("*"):
        if left.is_dir() and not left.with_suffix(".json").exists() and now - left.stat().st_mtime > RECENT:
            shutil.rmtree(left, ignore_errors=True)
