"""Engines: everything that can run a bundle here, the limits they share, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import EngineRecord, Manifest
from spaceport.graphs.contract.signature import Activations, Precision
from spaceport.runtime.backends import BACKENDS, by_reason, open_engine, require, why_not
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import PREFILL_ROWS, Engine, EngineFault, EngineOptions, capacity_for
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.accuracy import Array, CallFailed, ComparedEngine, RunCall
from spaceport.tools.verify.check.cases import REQUESTS, EngineLimits, replay
from spaceport.tools.verify.check.check_options import DEFAULT_LONG, SHORTEST, CheckOptions

_GENERATED = 64  # tokens that the cases generate after their longest prompt, at most


@dataclass(frozen=True)
class CheckedEngine:
    """An engine that can run the bundle."""

    name: str
    backend: str | None  # None: the PyTorch model
    dtype: Precision
    open: Callable[[], Engine]
    activations: Activations = "float"

    def compared(self, on_progress: Callable[[str], None]) -> ComparedEngine:
        """The engine as a comparison opens, runs and closes it."""

        @contextmanager
        def open_replay() -> Iterator[RunCall]:
            on_progress(f"running them on {self.name}")
            engine = self.open()
            try:
                yield raising_call_failed(replay(engine))
            finally:
                engine.close()

        return ComparedEngine(self.name, self.dtype, open_replay, self.activations)


@dataclass(frozen=True)
class EngineSelection:
    """The engines that are compared, their shared limits, and the backends that cannot run here."""

    engines: tuple[CheckedEngine, ...]  # the cases are recorded on the first one
    limits: EngineLimits
    not_compared: Mapping[str, str]  # reason by backend

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(engine.backend for engine in self.engines if engine.backend is not None)


def select_engines(bundle: Bundle, options: CheckOptions) -> EngineSelection:
    """Everything that can run a bundle here: the PyTorch model first, if there is a checkpoint, then the backends."""
    if options.layers and options.checkpoint is None:
        raise OptionFault("--layers compares with the PyTorch model: expected a CHECKPOINT after the bundle")
    limits = limits_of(bundle.manifest, options.length, _largest(bundle, options))
    engine_options = EngineOptions(limits.capacity, limits.requests, options.threads, options.trust_engines)
    not_compared = {}
    for name in options.backends:
        if name not in BACKENDS:
            raise OptionFault(f"backend is {name!r}: expected {', '.join(BACKENDS)}")
        require(bundle, name, engine_options)
    if not options.backends:
        not_compared = {
            name: reason for name in BACKENDS if (reason := why_not(bundle, name, engine_options)) is not None
        }
    named = [name for name in options.backends or BACKENDS if name not in not_compared]
    if not named:
        raise MissingDependency(f"{bundle.path}: no backend runs it here: {'; '.join(by_reason(not_compared))}")
    engines = [
        *_references(bundle, options, limits),
        *(_backend(bundle, name, engine_options) for name in dict.fromkeys(named)),
    ]
    if len(engines) < 2:
        raise OptionFault(_alone(bundle, engines, not_compared, options))
    return EngineSelection(tuple(engines), limits, not_compared)


def limits_of(manifest: Manifest, length_option: int | None, engines: Sequence[EngineRecord]) -> EngineLimits:
    """The longest prompt and the most requests and rows per call that all of these engines accept."""
    length = min(length_option or DEFAULT_LONG, manifest.max_positions)
    requests = min((REQUESTS, *(engine.requests for engine in engines)))
    rows = min((PREFILL_ROWS, *(engine.prefill_rows for engine in engines)))
    for engine in engines if length_option is None else ():
        while length > SHORTEST and capacity_for(manifest, length + _GENERATED) > engine.capacity:
            length -= 1
    return EngineLimits(length, capacity_for(manifest, length + _GENERATED), requests, rows)


def raising_call_failed(call: Callable[[Mapping[str, Array]], NDArray[np.float32]]) -> RunCall:
    """The same call, raising CallFailed for a fault of the engine."""

    def called(arrays: Mapping[str, Array]) -> NDArray[np.float32]:
        try:
            return call(arrays)
        except EngineFault as error:
            raise CallFailed(str(error)) from error

    return called


def _largest(bundle: Bundle, options: CheckOptions) -> list[EngineRecord]:
    """Of the engines built for this GPU and this graph, the one of each flavour with the largest capacity."""
    if no_gpu() is not None:
        return []
    flavours = {BACKENDS[name].flavour for name in options.backends or BACKENDS if name in BACKENDS} - {None}
    fitting = [
        record
        for record in bundle.manifest.engines.values()
        if record.graph == bundle.manifest.graph and record.target == gpu().target
    ]
    by_flavour = [[record for record in fitting if record.backend == flavour] for flavour in flavours]
    return [max(records, key=lambda record: (record.capacity, record.requests)) for records in by_flavour if records]


def _references(bundle: Bundle, options: CheckOptions, limits: EngineLimits) -> list[CheckedEngine]:
    if options.checkpoint is None:
        return []
    bundle_dtype = bundle.manifest.signature.dtype
    return [
        _reference(bundle, options, options.checkpoint, limits, dtype)
        for dtype in dict.fromkeys(("float32", bundle_dtype))
    ]


def _reference(
    bundle: Bundle, options: CheckOptions, checkpoint: Path, limits: EngineLimits, dtype: Precision
) -> CheckedEngine:
    def opened() -> Engine:
        return open_reference(
            *(bundle, checkpoint, limits.capacity, limits.requests, dtype),
            *(options.remote_code, options.threads, options.adapter),
        )

    return CheckedEngine(f"PyTorch {dtype}", None, dtype, opened, bundle.manifest.activations)


def _backend(bundle: Bundle, name: str, engine_options: EngineOptions) -> CheckedEngine:
    dtype, weights = bundle.manifest.signature.dtype, bundle.manifest.weights
    label = f"{name} {dtype}" + ("" if weights == "same" else f" {weights}")
    return CheckedEngine(
        label, name, dtype, lambda: open_engine(bundle, name, engine_options), bundle.manifest.activations
    )


def _alone(bundle: Bundle, engines: list[CheckedEngine], not_compared: Mapping[str, str], options: CheckOptions) -> str:
    alternative = ", or leave --backend out" if options.backends else ""
    reasons = "".join(f"; not {line}" for line in by_reason(not_compared))
    return (
        f"{bundle.path}: only {engines[0].name} runs it here, expected two engines to compare: name the CHECKPOINT that "
        f"it was exported from{alternative}{reasons}"
    )
