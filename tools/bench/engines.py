"""Engines: step times of a bundle on each backend, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spaceport.runtime.backends import BACKENDS, open_engine, why_not
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import EngineOptions
from spaceport.tools.bench import outside
from spaceport.tools.bench.steps import StepCost, step_costs


@dataclass(frozen=True)
class EngineVariant:
    """A backend and its CUDA graph setting."""

    backend: str
    graphs: bool  # use CUDA graphs

    def __str__(self) -> str:
        if not BACKENDS[self.backend].gpu:
            return self.backend
        return f"{self.backend}, {'CUDA graphs' if self.graphs else 'no CUDA graphs'}"


@dataclass(frozen=True)
class EngineMeasurement:
    """The measurements of one variant."""

    variant: EngineVariant
    device: str
    steps: tuple[StepCost, ...]
    outside: tuple[outside.RoundCost, ...]  # time per round outside the engine
    notes: tuple[str, ...]


def variants(
    bundle: Bundle, engine_options: EngineOptions, backends: Sequence[str]
) -> tuple[list[EngineVariant], dict[str, str]]:
    """The variants that can run a bundle here, and by backend the reasons why others cannot."""
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
    """Step times by number of rows, and the time of scheduler rounds outside the engine."""
    engine = open_engine(bundle, variant.backend, replace(engine_options, graphs=variant.graphs))
    try:
        steps = step_costs(engine, rows, context, rounds)
        cases = [case for case in outside.CASES if case[0] <= engine_options.requests]
        rounds_outside = [outside.measure(bundle, engine, requests, wide, rounds, None) for requests, wide in cases]
        return EngineMeasurement(variant, engine.device, tuple(steps), tuple(rounds_outside), engine.notes)
    finally:
        engine.close()
