"""Step costs of an engine: measured once for a machine and a bundle, and stored in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends.cpus import usable_cpus
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.private_files import read_private, replace_private
from spaceport.runtime.backends.timing import batched_requests, measure
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.costs import CostSource, CostTable, Points, StepCosts, fixed_costs
from spaceport.runtime.engine import Engine

_SCHEMA = 3
_PACKAGES = ("spaceport", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
_MOST_BYTES = 100_000  # maximum size of a file


def step_costs(bundle: Bundle, backend: str, engine: Engine, options: EngineOptions, source: CostSource) -> StepCosts:
    """The step costs of an opened engine: measured here, standard constants, or free."""
    if source not in get_args(CostSource):
        raise OptionFault(f"step_costs is {source!r}: expected {', '.join(get_args(CostSource))}")
    if source != "measured":
        return fixed_costs(engine.costs.row if source == "standard" else 0.0)
    file = cache_folder() / f"{_key(bundle, backend, engine, options)}.json"
    table = load(file)
    if table is None or table.requests != batched_requests(engine):
        table = measure(engine)
        with suppress(
            OSError
        ):  # full disk, read-only folder or that of another user: they are measured again next time
            store(file, table)
    return StepCosts(table)


def load(file: Path) -> CostTable | None:
    """The table in a file; None if there is no valid one, or if another user may have written it."""
    try:
        found = json.loads(read_private(file, _MOST_BYTES) or b"")
        if found.pop("schema") != _SCHEMA:
            return None
        return CostTable(
            visible=int(found["visible"]),
            single=_points(found["single"]),
            requests=int(found["requests"]),
            batched=_points(found["batched"]),
            slot=float(found["slot"]),
            row_slot=float(found["row_slot"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def store(file: Path, table: CostTable) -> None:
    """Write a table; other processes may do so at the same time."""
    replace_private(file, json.dumps({"schema": _SCHEMA, **asdict(table)}).encode())


def cache_folder() -> Path:
    """The folder with this user's tables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # the user has no home folder
            cache = Path(os.devnull)
    return cache / "spaceport" / "step-costs"


def _key(bundle: Bundle, backend: str, engine: Engine, options: EngineOptions) -> str:
    """A digest of everything that the costs depend on."""
    facts = (
        bundle.manifest.graph,
        backend,
        engine.device,
        (options.capacity, options.requests, options.threads),
        [(package, _version(package)) for package in _PACKAGES],
        (cpu_name(), usable_cpus()),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _points(found: Any) -> Points:
    return tuple((int(rows), float(seconds)) for rows, seconds in found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
