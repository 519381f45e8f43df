"""Lineup: all that can run a bundle here, the room that each of them has, and why the others cannot."""

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
from spaceport.runtime.backends.device import gpu, no_gpu
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.step import PREFILL_ROWS
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.accuracy import Array, Call, CallFailed, ComparedSide
from spaceport.tools.verify.check.cases import REQUESTS, Room, replay

DEFAULT_LONG = 1024
SHORTEST = 32
_BEYOND = 64  # tokens that the cases write behind their longest prompt


@dataclass(frozen=True)
class CheckOptions:
    """What is asked of a check."""

    checkpoint: Path | None = None
    backends: tuple[str, ...] = ()  # none: all that can run here
    length: int | None = None  # tokens of the longest case; nothing: what all engines have room for
    threads: int = 0
    seed: int = 0
    remote_code: bool = False
    trust_engines: bool = False
    layers: bool = False  # also find the first value inside the graph that is out of tolerance


@dataclass(frozen=True)
class Contender:
    """Something that runs a bundle."""

    name: str
    backend: str | None  # nothing: PyTorch
    dtype: Precision
    open: Callable[[], Engine]
    activations: Activations = "float"

    def side(self, stage: Callable[[str], None]) -> ComparedSide:
        """The same for a comparison, which opens it, feeds it all that was recorded and closes it."""

        @contextmanager
        def opened() -> Iterator[Call]:
            stage(f"running them on {self.name}")
            engine = self.open()
            try:
                yield failing(replay(engine))
            finally:
                engine.close()

        return ComparedSide(self.name, self.dtype, opened, self.activations)


@dataclass(frozen=True)
class Lineup:
    """Who is compared, in which room, and who is not."""

    contenders: tuple[Contender, ...]  # on the first one the cases are recorded
    room: Room
    absent: Mapping[str, str]  # by backend: why it is not compared

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(contender.backend for contender in self.contenders if contender.backend is not None)


def line_up(bundle: Bundle, options: CheckOptions) -> Lineup:
    """Everything that can run a bundle here: its PyTorch model first, if there is a checkpoint, then the backends."""
    if options.layers and options.checkpoint is None:
        raise OptionFault("--layers compares with the PyTorch model: expected a CHECKPOINT behind the bundle")
    room = room_of(bundle.manifest, options.length, _largest(bundle, options))
    engine_options = EngineOptions(room.capacity, room.requests, options.threads, options.trust_engines)
    absent = {}
    for name in options.backends:
        if name not in BACKENDS:
            raise OptionFault(f"backend is {name!r}: expected {', '.join(BACKENDS)}")
        require(bundle, name, engine_options)
    if not options.backends:
        absent = {name: reason for name in BACKENDS if (reason := why_not(bundle, name, engine_options)) is not None}
    named = [name for name in options.backends or BACKENDS if name not in absent]
    if not named:
        raise MissingDependency(f"{bundle.path}: nothing runs it here: {'; '.join(by_reason(absent))}")
    contenders = [
        *_references(bundle, options, room),
        *(_backend(bundle, name, engine_options) for name in dict.fromkeys(named)),
    ]
    if len(contenders) < 2:
        raise OptionFault(_alone(bundle, contenders, absent, options))
    return Lineup(tuple(contenders), room, absent)


def room_of(manifest: Manifest, asked_length: int | None, engines: Sequence[EngineRecord]) -> Room:
    """The longest text, requests and rows of a call that all of these engines have room for."""
    length = min(asked_length or DEFAULT_LONG, manifest.max_positions)
    requests = min((REQUESTS, *(engine.requests for engine in engines)))
    rows = min((PREFILL_ROWS, *(engine.prompt_rows for engine in engines)))
    for engine in engines if asked_length is None else ():
        while length > SHORTEST and capacity_for(manifest, length + _BEYOND) > engine.capacity:
            length -= 1
    return Room(length, capacity_for(manifest, length + _BEYOND), requests, rows)


def failing(call: Callable[[Mapping[str, Array]], NDArray[np.float32]]) -> Call:
    """A call whose engine's faults are what a comparison knows how to tell of."""

    def called(arrays: Mapping[str, Array]) -> NDArray[np.float32]:
        try:
            return call(arrays)
        except EngineFault as error:
            raise CallFailed(str(error)) from error

    return called


def _largest(bundle: Bundle, options: CheckOptions) -> list[EngineRecord]:
    """Of the engines that were built for this GPU and this graph: the one of each flavour with the most room."""
    if no_gpu() is not None:
        return []
    flavours = {BACKENDS[name].flavour for name in options.backends or BACKENDS if name in BACKENDS} - {None}
    fitting = [
        record
        for record in bundle.manifest.engines.values()
        if record.graph == bundle.manifest.graph and record.target == gpu().target
    ]
    own = [[record for record in fitting if record.flavour == flavour] for flavour in flavours]
    return [max(records, key=lambda record: (record.capacity, record.requests)) for records in own if records]


def _references(bundle: Bundle, options: CheckOptions, room: Room) -> list[Contender]:
    if options.checkpoint is None:
        return []
    own = bundle.manifest.signature.dtype
    return [_reference(bundle, options, options.checkpoint, room, dtype) for dtype in dict.fromkeys(("float32", own))]


def _reference(bundle: Bundle, options: CheckOptions, checkpoint: Path, room: Room, dtype: Precision) -> Contender:
    def opened() -> Engine:
        return open_reference(
            bundle, checkpoint, room.capacity, room.requests, dtype, options.remote_code, options.threads
        )

    return Contender(f"PyTorch {dtype}", None, dtype, opened, bundle.manifest.activations)


def _backend(bundle: Bundle, name: str, engine_options: EngineOptions) -> Contender:
    dtype, weights = bundle.manifest.signature.dtype, bundle.manifest.weights
    label = f"{name} {dtype}" + ("" if weights == "same" else f" {weights}")
    return Contender(label, name, dtype, lambda: open_engine(bundle, name, engine_options), bundle.manifest.activations)


def _alone(bundle: Bundle, contenders: list[Contender], absent: Mapping[str, str], options: CheckOptions) -> str:
    more = ", or leave --backend out" if options.backends else ""
    reasons = "".join(f"; not {line}" for line in by_reason(absent))
    return (
        f"{bundle.path}: {contenders[0].name} alone runs it here, expected two engines to compare: name the CHECKPOINT that "
        f"it was made from{more}{reasons}"
    )
