"""Engines: what steps take on each way that a bundle can be run, measured one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spaceport.runtime.backends import BACKENDS, open_engine, why_not
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import Bundle
from spaceport.tools.bench import outside
from spaceport.tools.bench.steps import StepCost, step_costs


@dataclass(frozen=True)
class EngineVariant:
    """How a bundle is run."""

    backend: str
    graphs: bool  # CUDA graphs beside the plain path

    def __str__(self) -> str:
        if not BACKENDS[self.backend].gpu:
            return self.backend
        return f"{self.backend}, {'CUDA graphs' if self.graphs else 'no CUDA graphs'}"


@dataclass(frozen=True)
class EngineMeasurement:
    """What was measured of one way."""

    variant: EngineVariant
    device: str
    steps: tuple[StepCost, ...]
    outside: tuple[outside.RoundCost, ...]  # of rounds beside the engine
    notes: tuple[str, ...]


def variants(
    bundle: Bundle, engine_options: EngineOptions, backends: Sequence[str]
) -> tuple[list[EngineVariant], dict[str, str]]:
    """The ways that a bundle can be run here, and why the other backends cannot run it."""
    found: list[EngineVariant] = []
    reasons: dict[str, str] = {}
    for backend in backends:
        reason = why_not(bundle, backend, engine_options)
        if reason is not None:
            reasons[backend] = reason
        else:
            found += [
                EngineVariant(backend, graphs) for graphs in ((False, True) if BACKENDS[backend].gpu else (False,))
            ]
    return found, reasons


def measure(
    bundle: Bundle,
    variant: EngineVariant,
    engine_options: EngineOptions,
    rows: Sequence[int],
    context: int,
    rounds: int,
) -> EngineMeasurement:
    """Steps of so many rows behind a text, and rounds with all that stands beside the engine."""
    engine = open_engine(bundle, variant.backend, replace(engine_options, graphs=variant.graphs))
    try:
        steps = step_costs(engine, rows, context, rounds)
        cases = [case for case in outside.CASES if case[0] <= engine_options.requests]
        beside = [outside.measure(bundle, engine, requests, wide, rounds, None) for requests, wide in cases]
        return EngineMeasurement(variant, engine.device, tuple(steps), tuple(beside), engine.notes)
    finally:
        engine.close()
