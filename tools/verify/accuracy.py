"""Accuracy: everything that runs a bundle held against each other by Polygraphy, case by case and pair by pair."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.manifest import ACCURACY_FILE
from spaceport.graphs.contract.signature import Activations, Precision
from spaceport.graphs.contract.tolerance import tolerance_of

Array = NDArray[Any]
# Runs the rows of one feed on an engine, which keeps its KV buffers from feed to feed; the logits, B x R x V.
Call = Callable[[Mapping[str, Array]], NDArray[np.float32]]


class CallFailed(RuntimeError):
    """An engine gave no logits; the message is the engine's own."""


@dataclass(frozen=True)
class Feed:
    """The inputs of one call, the case that it belongs to, and the logits of the engine on which it was recorded."""

    case: str
    arrays: dict[str, Array]
    expected: NDArray[np.float32]


@dataclass(frozen=True)
class ComparedSide:
    """Something that runs a bundle: it is opened for all feeds, one after the other, and then closed."""

    name: str
    dtype: Precision
    opened: Callable[[], AbstractContextManager[Call]]
    activations: Activations = "float"

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.dtype, self.activations)


@dataclass(frozen=True)
class LogitDifference:
    """How the logits of two sides differ, in one call or over a case."""

    case: str
    rows: int
    max_error: float
    mean_error: float
    largest_logit: float
    disagreements: int  # rows whose top token differs
    margin: float | None  # smallest distance between the first side's first and second token where they differ
    tolerance: float
    fault: str | None = None  # what an engine said that failed in it

    @property
    def passed(self) -> bool:
        return self.fault is None and self.max_error <= self.allowed  # NaN is not

    @property
    def allowed(self) -> float:
        """The largest error that rounding explains."""
        return self.tolerance * max(1.0, self.largest_logit)

    @property
    def excess(self) -> float:
        """The error in multiples of what is allowed; what is not a number is worse than all others."""
        return np.inf if self.fault is not None or np.isnan(self.max_error) else self.max_error / self.allowed

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        told = {**asdict(self), "allowed": self.allowed, "passed": self.passed}
        return {name: None if value != value else value for name, value in told.items()}  # JSON has no NaN


@dataclass(frozen=True)
class ComparedPair:
    """Two sides, and a finding for each case."""

    first: str
    second: str
    dtype: Precision  # the coarser of their types, from which the tolerance follows
    differences: tuple[LogitDifference, ...]
    tolerance: float  # largest error that rounding explains, as a share of the largest logit

    @property
    def passed(self) -> bool:
        return all(self.differences)

    @property
    def worst(self) -> LogitDifference:
        return max(self.differences, key=lambda difference: difference.excess)

    @property
    def agreement(self) -> float:
        """The share of rows with the same top token."""
        rows = sum(difference.rows for difference in self.differences)
        return 1 - sum(difference.disagreements for difference in self.differences) / max(1, rows)

    def as_dict(self) -> dict[str, Any]:
        told = {"first": self.first, "second": self.second, "dtype": self.dtype, "tolerance": self.tolerance}
        cases = [difference.as_dict() for difference in self.differences]
        return {**told, "passed": self.passed, "agreement": self.agreement, "cases": cases}


class SideRunner(BaseRunner):  # type: ignore[misc]  # polygraphy ships no types
    """A side as Polygraphy sees it."""

    def __init__(self, side: ComparedSide, feeds: Sequence[Feed]) -> None:
        super().__init__(name=side.name)
        self.faults: dict[str, str] = {}  # of the cases in which it failed
        self._side = side
        self._feeds = feeds
        self._left: Iterator[Feed] = iter(())
        self._open = ExitStack()
        self._call: Call | None = None

    def activate_impl(self) -> None:
        self._call = self._open.enter_context(self._side.opened())
        self._left = iter(self._feeds)

    def deactivate_impl(self) -> None:
        self._open.close()

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for name, array in self._feeds[0].arrays.items():
            metadata.add(name, dtype=array.dtype, shape=(None,) * array.ndim)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        assert self._call is not None
        case, started = next(self._left).case, time.perf_counter()
        logits = np.empty(0, np.float32)  # of a case in which it failed: what it wrote before is not there any more
        if case not in self.faults:
            try:
                logits = self._call(feed_dict).copy()
            except CallFailed as error:
                self.faults[case] = f"{self.name}: {error}"
        self.inference_time = time.perf_counter() - started
        return OrderedDict(logits=logits)


def recorded(name: str, dtype: Precision, feeds: Sequence[Feed], activations: Activations = "float") -> ComparedSide:
    """The side on which the feeds were recorded, whose logits are known."""

    def opened() -> AbstractContextManager[Call]:
        left = iter(feeds)
        return contextlib.nullcontext(lambda arrays: next(left).expected)

    return ComparedSide(name, dtype, opened, activations)


def compare(sides: Sequence[ComparedSide], feeds: Sequence[Feed]) -> list[ComparedPair]:
    """All pairs of the sides, which run one after the other, compared on all logits that were asked for."""
    runners = [SideRunner(side, feeds) for side in sides]
    named = {side.name: side for side in sides}

    def compared(first: Any, second: Any) -> OrderedDict[str, LogitDifference]:
        tolerance = _coarser(named[first.runner_name], named[second.runner_name]).tolerance
        return OrderedDict(logits=compare_logits("", first["logits"], second["logits"], tolerance))

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), contextlib.redirect_stdout(io.StringIO()):
        results = Comparator.run(runners, data_loader=[feed.arrays for feed in feeds], warm_up=0)
        pairs = list(combinations(range(len(sides)), 2))
        (report,) = Comparator.compare_accuracy(results, comparisons=pairs, compare_func=compared)
    faults = {runner.name: runner.faults for runner in runners}
    return [
        ComparedPair(
            first,
            second,
            _coarser(named[first], named[second]).dtype,
            _by_case(feeds, calls, faults[first] | faults[second]),
            _coarser(named[first], named[second]).tolerance,
        )
        for (first, second), calls in report.items()
    ]


def compare_logits(case: str, expected: Array, got: Array, tolerance: float) -> LogitDifference:
    """How two calls' logits differ; not a number where one of them has none."""
    if expected.shape != got.shape:
        rows = max(expected.size // max(1, expected.shape[-1]), got.size // max(1, got.shape[-1]))
        return LogitDifference(case, rows, np.nan, np.nan, 0.0, rows, None, tolerance)
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    first, other = expected.argmax(-1), got.argmax(-1)
    differ = first != other
    margins = np.diff(np.partition(expected, -2, axis=-1)[..., -2:], axis=-1)[..., 0][differ]
    return LogitDifference(
        case=case,
        rows=int(differ.size),
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if error.size else 0.0,
        largest_logit=float(np.abs(expected).max(initial=0.0)),
        disagreements=int(differ.sum()),
        margin=float(margins.min()) if margins.size else None,
        tolerance=tolerance,
    )


def together(parts: Sequence[LogitDifference]) -> LogitDifference:
    """The calls of a case as one finding: its worst error, its mean over rows."""
    rows = sum(part.rows for part in parts)
    margins = [part.margin for part in parts if part.margin is not None]
    worst = max(parts, key=lambda part: part.excess)
    return LogitDifference(
        case=worst.case,
        rows=rows,
        max_error=worst.max_error,
        mean_error=sum(part.mean_error * part.rows for part in parts) / max(1, rows),
        largest_logit=worst.largest_logit,
        disagreements=sum(part.disagreements for part in parts),
        margin=min(margins, default=None),
        tolerance=worst.tolerance,
    )


def _by_case(feeds: Sequence[Feed], calls: Sequence[Any], faults: Mapping[str, str]) -> tuple[LogitDifference, ...]:
    parts: dict[str, list[LogitDifference]] = {}
    for feed, outputs in zip(feeds, calls, strict=True):
        parts.setdefault(feed.case, []).append(replace(outputs["logits"], case=feed.case))
    return tuple(replace(together(part), fault=faults.get(case)) for case, part in parts.items())


def _coarser(first: ComparedSide, second: ComparedSide) -> ComparedSide:
    return max(first, second, key=lambda side: side.tolerance)


def write_report(bundle: Path, report: Mapping[str, Any]) -> None:
    """Put a report into a bundle, the old one staying until the new one is whole."""
    replace_text(bundle / ACCURACY_FILE, json.dumps(report, indent=2) + "\n")
