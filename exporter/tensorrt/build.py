"""Build: build an engine from the graph of a bundle and store it in the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spaceport.exporter.atomic_folder import FolderKind, require_space
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.builder_monitor import OnProgress
from spaceport.exporter.tensorrt.engines import engine_name, find_engine, require_writable, store_engine
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, attention_of, build
from spaceport.graphs.contract.manifest import EngineRecord, Manifest

_ENGINE = FolderKind("engine", ".engine")
_KERNELS = 64 << 20  # upper estimate of an engine's size without weights, in bytes


@dataclass(frozen=True)
class BuildResult:
    """An engine in a bundle, and whether it was built or reused."""

    name: str
    record: EngineRecord
    built: bool  # False: an existing engine was reused
    decomposed: str = ""  # why attention runs as matmuls; empty if it is fused in all layers
    activation: int | None = None  # activation memory in bytes; None: unknown


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
    require_space(folder, manifest.graph_bytes + _KERNELS, _ENGINE)
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
        refittable=options.refittable,
        decomposed=built.attention.decomposed,
    )
    require_unchanged()
    store_engine(folder, name, built.plan, record)
    return BuildResult(name, record, True, built.attention.reason, built.activation or None)
