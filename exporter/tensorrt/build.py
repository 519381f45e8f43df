"""Build: a bundle's graph becomes an engine in the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spaceport.exporter.atomic_folder import FolderKind, require_space
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.builder_monitor import OnProgress
from spaceport.exporter.tensorrt.engines import found, name_of, require_writable, store
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, attention_of, build
from spaceport.graphs.contract.manifest import EngineRecord, Manifest

_ENGINE = FolderKind("engine", ".engine")
_KERNELS = 64 << 20  # bytes that an engine takes beside its weights, generously


@dataclass(frozen=True)
class BuildResult:
    """An engine of a bundle, and how it came there."""

    name: str
    record: EngineRecord
    built: bool  # False: it was there already
    decomposed: str = ""  # why attention layers run as matrix products, if any do
    activation: int | None = None  # bytes that running it takes beside weights and buffers; nothing: not known


def host_memory(manifest: Manifest) -> int:
    """Bytes of this machine's memory that a build takes, nearly: 0.34 GB were measured for 4 MB of weights, 0.98 for 180."""
    return 4 * manifest.graph_bytes + (330 << 20)


def build_engine(
    folder: Path,
    manifest: Manifest,
    library: Library,
    recipe: BuildOptions,
    reusable: Callable[[EngineRecord], bool] = lambda record: True,
    begin: Callable[[], None] = lambda: None,
    hear: OnProgress = lambda done, phase: None,
) -> BuildResult:
    """The engine of a checked bundle for a target: built and stored, or the one that is there and was built alike."""
    graph, signature = manifest.graph, manifest.signature
    name = name_of(graph, signature.vocab_size, library, recipe)
    model = append_graph(folder, signature, recipe.shapes.capacity)
    record = found(folder, manifest, name)
    if record is not None and reusable(record):
        return BuildResult(name, record, False, attention_of(model, signature).reason if record.decomposed else "")
    require_writable(folder)
    require_space(folder, manifest.graph_bytes + _KERNELS, _ENGINE)
    begin()
    built = build(library, model, folder, signature, recipe, hear)
    shapes = recipe.shapes
    record = EngineRecord(
        sha256=hashlib.sha256(built.plan).hexdigest(),
        size=built.plan.nbytes,
        graph=graph,
        flavour=library.flavour,
        version=library.version,
        target=recipe.target,
        capacity=shapes.capacity,
        requests=shapes.requests,
        step_rows=shapes.step_rows,
        prompt_rows=shapes.prompt_rows,
        refittable=recipe.refittable,
        decomposed=built.attention.decomposed,
    )
    store(folder, name, built.plan, record)
    return BuildResult(name, record, True, built.attention.reason, built.activation or None)
