"""Benchmark: services that start with a warm and a cold page cache, and with and without stored step costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import read_manifest
from spaceport.tools.bench.compare.machine import Machine, this_machine
from spaceport.tools.bench.start import page_cache
from spaceport.tools.bench.start.service_start import Start, measured

PageCache = Literal["warm", "cold"]
PHASES = tuple(field.name for field in fields(Start))


@dataclass(frozen=True)
class Condition:
    """What a service finds when it starts."""

    page_cache: PageCache  # whether the bundles' files are in memory
    step_costs: bool  # whether the step costs of this machine are stored


@dataclass(frozen=True)
class Starts:
    """All starts under one condition."""

    condition: Condition
    rounds: tuple[Start, ...]

    @property
    def medians(self) -> Start:
        """The median of each phase; phases of different rounds do not add up exactly."""
        return Start(*(median(getattr(one, name) for one in self.rounds) for name in PHASES))


@dataclass(frozen=True)
class StartReport:
    """The results of a benchmark."""

    bundles: tuple[str, ...]
    weight_bytes: int  # size of all graphs and weights
    machine: Machine
    prompt: str
    starts: tuple[Starts, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        starts = [{**asdict(one), "medians": asdict(one.medians)} for one in self.starts]
        return {**asdict(self), "starts": starts}


def benchmark(
    bundles: Sequence[Path],
    flags: Sequence[str],
    prompt: str,
    page_caches: Sequence[PageCache],
    rounds: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StartReport:
    """The starts of a service under each condition; conditions alternate, so that other load affects all of them."""
    size = sum(read_manifest(bundle, allow_links=True).graph_bytes for bundle in bundles)
    if rounds < 1:
        raise OptionFault(f"rounds is {rounds}: expected at least 1")
    conditions = [Condition(cache, stored) for cache in page_caches for stored in (True, False)]
    found: dict[Condition, list[Start]] = {condition: [] for condition in conditions}
    with tempfile.TemporaryDirectory(prefix="spaceport-start-") as folder:
        stored, log = Path(folder) / "state", Path(folder) / "service.log"
        on_progress("warm-up")
        measured(bundles, flags, prompt, stored, log)
        for number in range(rounds):
            for condition in conditions:
                on_progress(f"round {number + 1} of {rounds}: page cache {condition.page_cache}, {_costs(condition)}")
                _prepare(bundles, condition.page_cache)
                with tempfile.TemporaryDirectory(dir=folder) as empty:
                    state = stored if condition.step_costs else Path(empty)
                    found[condition].append(measured(bundles, flags, prompt, state, log))
    starts = tuple(Starts(condition, tuple(rounds)) for condition, rounds in found.items())
    return StartReport(tuple(map(str, bundles)), size, this_machine(), prompt, starts)


def _prepare(bundles: Sequence[Path], cache: PageCache) -> None:
    for bundle in bundles:
        if cache == "cold":
            page_cache.drop(bundle)
        else:
            page_cache.read(bundle)


def _costs(condition: Condition) -> str:
    return "stored step costs" if condition.step_costs else "no step costs"
