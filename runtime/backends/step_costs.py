"""Step costs and exactness of an engine: measured once for a machine and a bundle, and stored in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, get_args

from spaceport.graphs.contract.exactness import Exactness, tolerated_noise
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends.cpus import cpu_name, instruction_sets, usable_cpus
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.private_files import read_private, replace_private
from spaceport.runtime.backends.probe import probe
from spaceport.runtime.backends.timing import batched_requests, measure
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.costs import CostSource, Points, StepCosts, relative_costs
from spaceport.runtime.engine import Engine

_SCHEMA = 5
_PACKAGES = ("spaceport", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
_MOST_BYTES = 100_000  # maximum size of a file


class Measurements(NamedTuple):
    """What was measured on an engine."""

    exactness: Exactness
    table: StepCosts | None = None  # None: it was opened with other step costs than measured ones


def measured_here(
    bundle: Bundle, backend: str, engine: Engine, options: EngineOptions, source: CostSource
) -> tuple[StepCosts, Exactness]:
    """The step costs of an opened engine, which are measured here, standard constants or free, and its exactness."""
    if source not in get_args(CostSource):
        raise OptionFault(f"step_costs is {source!r}: expected {', '.join(get_args(CostSource))}")
    file = cache_folder() / f"{_key(bundle, backend, engine.device, options)}.json"
    stored = load(file)
    exactness = probe(engine, tolerated_noise(bundle.manifest)) if stored is None else stored.exactness
    table = None if stored is None else stored.table
    if source == "measured" and (table is None or table.requests != batched_requests(engine)):
        table = measure(engine)
    if (found := Measurements(exactness, table)) != stored:
        with suppress(
            OSError
        ):  # full disk, read-only folder or that of another user: they are measured again next time
            store(file, found)
    if source == "measured" and table is not None:
        return table, exactness
    return relative_costs(engine.costs.row if source == "standard" else 0.0), exactness


def known_exactness(bundle: Bundle, backend: str, device: str, options: EngineOptions) -> Exactness | None:
    """The exactness that was measured when a bundle was opened here before; None if it was not."""
    found = load(cache_folder() / f"{_key(bundle, backend, device, options)}.json")
    return None if found is None else found.exactness


def load(file: Path) -> Measurements | None:
    """The measurements in a file; None if there are no valid ones, or if another user may have written them."""
    try:
        found = json.loads(read_private(file, _MOST_BYTES) or b"")
        if found["schema"] != _SCHEMA:
            return None
        noise, table = found["exactness"], found["table"]
        widths = tuple(map(int, noise["widths"]))
        exactness = Exactness(float(noise["rows"]), float(noise["slots"]), float(noise["tolerated"]), widths)
        return Measurements(exactness, None if table is None else _table(table))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _table(found: Any) -> StepCosts:
    return StepCosts(
        visible=int(found["visible"]),
        single=_points(found["single"]),
        requests=int(found["requests"]),
        batched=_points(found["batched"]),
        slot=float(found["slot"]),
        row_slot=float(found["row_slot"]),
    )


def store(file: Path, found: Measurements) -> None:
    """Write measurements; other processes may do so at the same time."""
    table = None if found.table is None else asdict(found.table)
    content = {"schema": _SCHEMA, "exactness": asdict(found.exactness), "table": table}
    replace_private(file, json.dumps(content).encode())


def cache_folder() -> Path:
    """The folder with this user's measurements."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # the user has no home folder
            cache = Path(os.devnull)
    return cache / "spaceport" / "step-costs"


def _key(bundle: Bundle, backend: str, device: str, options: EngineOptions) -> str:
    """A digest of everything that the costs depend on."""
    facts = (
        bundle.manifest.graph,
        backend,
        device,
        (options.capacity, options.requests, options.threads),
        [(package, _version(package)) for package in _PACKAGES],
        (cpu_name(), instruction_sets(), usable_cpus()),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _points(found: Any) -> Points:
    return tuple((int(rows), float(seconds)) for rows, seconds in found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
