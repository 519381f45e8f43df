"""Engines: what was built from a bundle's graph, kept in the bundle under all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from spaceport.exporter.folder_lock import locked_folder
from spaceport.exporter.interrupts import interrupts_deferred
from spaceport.exporter.tensorrt.profiles import profiles
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library
from spaceport.graphs.contract.atomic_file import is_partial, staged
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import (
    ENGINES_FOLDER,
    MANIFEST_FILE,
    SCHEMA,
    EngineRecord,
    Manifest,
    manifest_of,
    record_of,
)

_RECIPE = 2  # raised when engines of the same key come out in another way
_ENGINE = ".engine"  # how names end; whatever else is there is somebody's own


class ChangedBundle(InputFault):
    """A bundle that was exported again while an engine was built from it."""


def name_of(graph: tuple[str, ...], vocab_size: int, library: Library, recipe: BuildOptions) -> str:
    """The file name of an engine: its target and a digest of everything that it depends on."""
    depends = {
        "recipe": _RECIPE,
        "graph": graph,
        "flavour": library.flavour,
        "version": library.version,
        "target": recipe.target,
        "shapes": asdict(recipe.shapes),
        "profiles": profiles(recipe.shapes, vocab_size, recipe.mask_slots),
        "workspace": recipe.workspace,
        "refittable": recipe.refittable,
    }
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return f"{recipe.target}-{digest[:12]}{_ENGINE}"


def require_writable(folder: Path) -> None:
    """Raise if no engine could be put into a bundle, before one is built."""
    for place in (folder, folder / ENGINES_FOLDER):
        if place.exists() and not os.access(place, os.W_OK | os.X_OK):
            raise InputFault(f"{place}: no permission to write in it: copy the bundle to where there is")


def found(folder: Path, manifest: Manifest, name: str) -> EngineRecord | None:
    """The engine of this name, if it is in the bundle and whole."""
    record, file = manifest.engines.get(name), folder / ENGINES_FOLDER / name
    if record is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return record if record_of(stream) == record.file else None


def store(folder: Path, name: str, plan: memoryview, record: EngineRecord) -> None:
    """Put an engine into a bundle and its manifest, and drop those that it stands for; all of it or nothing."""
    with _locked(folder):
        manifest = manifest_of(json.loads((folder / MANIFEST_FILE).read_text("utf-8")))
        if record.graph != manifest.graph:
            raise ChangedBundle(f"{folder}: its graph was replaced while the engine was built: build it again")
        engines = folder / ENGINES_FOLDER
        kept = {
            other: told
            for other, told in manifest.engines.items()
            if other != name and not _stands_for(record, told) and (engines / other).is_file()
        }
        written = replace(manifest, engines={**kept, name: record}, schema=SCHEMA)
        # An interrupt waits. What may fail is done first: then two files take their places.
        with (
            interrupts_deferred(),
            _room_for_engines(engines),
            _staged(engines / name, plan) as put_engine,
            _staged(folder / MANIFEST_FILE, written.as_json().encode()) as put_manifest,
        ):
            put_engine()
            put_manifest()
        for file in engines.iterdir():
            if _is_ours(file) and file.name not in written.engines:
                file.unlink()


def _stands_for(record: EngineRecord, told: EngineRecord) -> bool:
    """Whether an engine of an earlier graph, or one that no runtime could tell from this one, makes room for it."""
    alike = replace(told, sha256=record.sha256, size=record.size, decomposed=record.decomposed)
    return told.graph != record.graph or alike == record


@contextmanager
def _room_for_engines(folder: Path) -> Iterator[None]:
    """The folder of engines, which does not stay if it was made for one that came to nothing."""
    folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _staged(file: Path, content: bytes | memoryview) -> Iterator[Callable[[], None]]:
    """Content on the disk that takes the place of `file` when the yielded function is called."""
    with ExitStack() as stack:
        try:
            put = stack.enter_context(staged(file, content, durable=True))
        except OSError as error:
            reason = f"{error.strerror} while {len(content) / 1e6:.1f} MB were written: make room and build again"
            raise OSError(error.errno, reason, str(file)) from error
        yield put


def _is_ours(file: Path) -> bool:
    """Whether a file is an engine, or what a killed build left of one; earlier versions added `.partial` to its name."""
    return file.name.endswith((_ENGINE, f"{_ENGINE}.partial")) or (is_partial(file) and _ENGINE in file.name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among those that change this bundle."""
    with locked_folder(folder) as descriptor:
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise ChangedBundle(f"{folder}: was exported again while the engine was built: build it again")
        yield
