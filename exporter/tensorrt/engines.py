"""Build engines from the graph of a bundle, and store them in the bundle, named by a digest of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spaceport.exporter.atomic_folder import FolderKind, locked, require_space
from spaceport.exporter.interrupts import interrupts_deferred
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, OnProgress, attention_of, build, profiles
from spaceport.graphs.contract.atomic_file import is_partial, staged
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import (
    ENGINES_FOLDER,
    MANIFEST_FILE,
    EngineRecord,
    Manifest,
    manifest_content,
    manifest_in,
    record_of,
)

_BUILD_VERSION = 2  # increased when the same options build a different engine
_SUFFIX = ".engine"  # of files; others in the folder are not touched
_KERNELS = 64 << 20  # upper estimate of an engine's size without weights, in bytes


@dataclass(frozen=True)
class BuildResult:
    """An engine in a bundle, and whether it was built or reused."""

    name: str
    record: EngineRecord
    built: bool  # False: an existing engine was reused
    decomposed: str = ""  # why attention runs as matmuls; empty if it is fused in all layers
    activation: int | None = None  # activation memory in bytes; None: unknown


def engine_name(graph: tuple[str, ...], row_logits: int, library: Library, options: BuildOptions) -> str:
    """The file name of an engine: its target and a digest of everything that it depends on."""
    depends = {
        "recipe": _BUILD_VERSION,
        "graph": graph,
        "flavour": library.flavour,
        "version": library.version,
        "target": options.target,
        "shapes": asdict(options.shapes),
        "profiles": profiles(options.shapes, row_logits, options.mask_slots),
        "workspace": options.workspace,
    }
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return f"{options.target}-{digest[:12]}{_SUFFIX}"


def require_writable(folder: Path) -> None:
    """Raise if an engine cannot be written into a bundle; called before the build."""
    for path in (folder, folder / ENGINES_FOLDER):
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise InputFault(f"{path}: no permission to write in it: copy the bundle to a folder that is writable")


def find_engine(folder: Path, manifest: Manifest, name: str) -> EngineRecord | None:
    """The record of the engine with this name, if its file exists with the recorded digest."""
    record, file = manifest.engines.get(name), folder / ENGINES_FOLDER / name
    if record is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return record if record_of(stream) == record.file else None


def store_engine(folder: Path, name: str, plan: memoryview, record: EngineRecord) -> None:
    """Add an engine to a bundle and its manifest, and remove the engines that it replaces; all or nothing."""
    with locked(folder) as descriptor:
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise InputFault(f"{folder}: was exported again while the engine was built: build it again")
        manifest = manifest_in((folder / MANIFEST_FILE).read_bytes())
        if record.graph != manifest.graph:
            raise InputFault(f"{folder}: its graph was replaced while the engine was built: build it again")
        engines = folder / ENGINES_FOLDER
        others = {
            other: other_record
            for other, other_record in manifest.engines.items()
            if other != name and not _replaces(record, other_record) and (engines / other).is_file()
        }
        written = replace(manifest, engines={**others, name: record})
        with interrupts_deferred():
            _write(engines / name, plan, folder / MANIFEST_FILE, manifest_content(written))
        for file in engines.iterdir():
            is_engine = file.name.endswith(_SUFFIX) or (is_partial(file) and _SUFFIX in file.name)  # of a killed build
            if is_engine and file.name not in written.engines:
                file.unlink()


def _write(engine: Path, plan: memoryview, manifest: Path, content: bytes) -> None:
    """Replace an engine and the manifest. Both are written before either replaces its target, since writing may fail."""
    engines = engine.parent
    engines.mkdir(exist_ok=True)
    try:
        with (
            staged(engine, plan, durable=True) as put_engine,
            staged(manifest, content, durable=True) as put_manifest,
        ):
            put_engine()
            put_manifest()
    except OSError as error:
        reason = f"{error.strerror} while {len(plan) / 1e6:.1f} MB were written: free some space and build again"
        raise OSError(error.errno, reason, str(engine)) from error
    finally:
        if not any(engines.iterdir()):
            engines.rmdir()


def _replaces(record: EngineRecord, other: EngineRecord) -> bool:
    """Whether the other engine is obsolete: built from an earlier graph, or indistinguishable for a runtime."""
    same_file = replace(other, sha256=record.sha256, size=record.size, decomposed=record.decomposed)
    return other.graph != record.graph or same_file == record


def host_memory(manifest: Manifest) -> int:
    """Estimated host memory of a build in bytes; measured: 0.34 GB for 4 MB of weights, 0.98 GB for 180 MB."""
    return 4 * manifest.graph_bytes + (330 << 20)


def build_engine(
    folder: Path,
    manifest: Manifest,
    library: Library,
    options: BuildOptions,
    reusable: Callable[[EngineRecord], bool] = lambda record: True,
    on_start: Callable[[], None] = lambda: None,
    on_progress: OnProgress = lambda done, phase: None,
    require_unchanged: Callable[[], None] = lambda: None,
) -> BuildResult:
    """Build and store an engine in a checked bundle, or return the existing engine with the same options.

    `require_unchanged` is called before the engine is stored, and raises if the graph's files are not those that were
    verified: the builder reads them by their names.
    """
    graph, signature = manifest.graph, manifest.signature
    name = engine_name(graph, signature.row_logits, library, options)
    model = append_graph(folder, signature, options.shapes.capacity)
    record = find_engine(folder, manifest, name)
    if record is not None and reusable(record):
        return BuildResult(name, record, False, attention_of(model, signature).reason if record.decomposed else "")
    require_writable(folder)
    require_space(folder, manifest.graph_bytes + _KERNELS, FolderKind("engine", _SUFFIX))
    on_start()
    built = build(library, model, folder, signature, options, on_progress)
    shapes = options.shapes
    record = EngineRecord(
        sha256=hashlib.sha256(built.plan).hexdigest(),
        size=built.plan.nbytes,
        graph=graph,
        backend=library.flavour,
        version=library.version,
        target=options.target,
        capacity=shapes.capacity,
        requests=shapes.requests,
        step_rows=shapes.step_rows,
        prefill_rows=shapes.prompt_rows,
        decomposed=built.attention.decomposed,
    )
    require_unchanged()
    store_engine(folder, name, built.plan, record)
    return BuildResult(name, record, True, built.attention.reason, built.activation or None)
