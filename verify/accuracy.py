"""Accuracy: engines of a bundle compared with Polygraphy, pair by pair and case by case."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
from spaceport.graphs.contract.exactness import NATIVE_MEAN, OTHER_EXPERTS, tolerance_of
from spaceport.graphs.contract.manifest import ACCURACY_FILE
from spaceport.graphs.contract.progress import reaches_quarter
from spaceport.graphs.contract.signature import Precision
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.verify.cases import Array, RecordedCall


@dataclass(frozen=True)
class ComparedEngine:
    """An engine to compare: opened, run on all recorded calls in order, and closed."""

    name: str
    dtype: Precision
    open: Callable[[], Engine]
    backend: str | None = None  # None: a reference, the PyTorch model or standard operators


@dataclass(frozen=True)
class LogitDifference:
    """How the logits of two engines differ, in one call or over a case."""

    case: str
    rows: int
    beyond: int  # rows with a larger error than is allowed
    max_error: float
    mean_error: float
    largest_logit: float
    disagreements: int  # rows whose top-1 token differs
    margin: float | None  # smallest top-1 minus top-2 logit of the first engine in these rows
    tolerance: float
    fault: str | None = None  # error message of the engine that failed

    @property
    def passed(self) -> bool:
        return self.fault is None and self.max_error <= self.allowed  # False for NaN

    @property
    def allowed(self) -> float:
        """The largest error that rounding explains."""
        return self.tolerance * max(1.0, self.largest_logit)

    @property
    def excess(self) -> float:
        """The error as a multiple of the allowed one; infinite for NaN and for a failed engine."""
        return np.inf if self.fault is not None or np.isnan(self.max_error) else self.max_error / self.allowed

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        data = {**asdict(self), "allowed": self.allowed, "passed": self.passed}
        return {name: None if value != value else value for name, value in data.items()}  # JSON has no NaN


@dataclass(frozen=True)
class ComparedPair:
    """Two engines, and a finding for each case."""

    first: str
    second: str
    dtype: Precision  # the coarser of their types, which sets the tolerance
    differences: tuple[LogitDifference, ...]
    tolerance: float  # largest error that rounding explains, relative to the largest logit
    native: bool = False
    experts: bool = False

    @property
    def passed(self) -> bool:
        broken = any(difference.fault is not None or np.isnan(difference.max_error) for difference in self.differences)
        exempt = OTHER_EXPERTS * self.rows if self.experts else 0
        return not broken and self.beyond <= exempt and not (self.native and self.mean_error > NATIVE_MEAN)

    @property
    def rows(self) -> int:
        return sum(difference.rows for difference in self.differences)

    @property
    def beyond(self) -> int:
        """Rows with a larger error than is allowed."""
        return sum(difference.beyond for difference in self.differences)

    @property
    def mean_error(self) -> float:
        """The mean error of all rows, relative to the largest logit of their case."""
        errors = [each.rows * each.mean_error / max(1.0, each.largest_logit) for each in self.differences]
        return sum(errors) / max(1, self.rows)

    @property
    def worst(self) -> LogitDifference:
        return max(self.differences, key=lambda difference: difference.excess)

    @property
    def agreement(self) -> float:
        """Share of rows with the same top-1 token."""
        return 1 - sum(difference.disagreements for difference in self.differences) / max(1, self.rows)

    def as_dict(self) -> dict[str, Any]:
        pair = {"first": self.first, "second": self.second, "dtype": self.dtype, "tolerance": self.tolerance}
        cases = [difference.as_dict() for difference in self.differences]
        found = {"mean_error": None if np.isnan(self.mean_error) else self.mean_error, "beyond": self.beyond}
        return {**pair, "passed": self.passed, "agreement": self.agreement, **found, "cases": cases}


class EngineRunner(BaseRunner):  # type: ignore[misc]  # polygraphy ships no types
    """A Polygraphy runner over an engine; the one that the calls were recorded on does not run again."""

    def __init__(
        self,
        compared: ComparedEngine,
        calls: Sequence[RecordedCall],
        recorded: bool,
        on_progress: Callable[[str], None],
    ) -> None:
        super().__init__(name=compared.name)
        self.faults: dict[str, str] = {}  # error message by case
        self._compared, self._calls, self._recorded, self._on_progress = compared, calls, recorded, on_progress
        self._engine: Engine | None = None

    def activate_impl(self) -> None:
        if not self._recorded:
            self._on_progress(f"running them on {self.name}")
            self._engine = self._compared.open()

    def deactivate_impl(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def get_input_metadata_impl(self) -> TensorMetadata:
        return TensorMetadata().add("call", dtype=np.int64, shape=(1,))

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        started, number, total = time.perf_counter(), int(feed_dict["call"][0]), len(self._calls)
        call = self._calls[number]
        logits = call.expected
        if self._engine is not None:
            logits = self._logits(call, self._engine)
            if reaches_quarter(number, number + 1, total):
                self._on_progress(f"compared {number + 1} of {total} calls")
        self.inference_time = time.perf_counter() - started
        return OrderedDict(logits=logits)

    def _logits(self, call: RecordedCall, engine: Engine) -> NDArray[np.float32]:
        """The logits of a call; none after a failure: the KV cache is lost, and the rest of the case is not run."""
        if call.case not in self.faults:
            try:
                return np.array(call.run(engine))
            except EngineFault as error:
                self.faults[call.case] = f"{self.name}: {error}"
        return np.empty(0, np.float32)


def compare(
    engines: Sequence[ComparedEngine],
    calls: Sequence[RecordedCall],
    native: bool = False,
    experts: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[ComparedPair]:
    """The differences of every pair of engines on the logits of all calls, which were recorded on the first engine.

    The engines run one after the other. `native`: they compute with native operators, or what these compute. `experts`:
    rows choose experts by rounded states.
    """
    runners = [EngineRunner(engine, calls, engine is engines[0], on_progress) for engine in engines]
    dtypes = {engine.name: engine.dtype for engine in engines}

    def coarser(first: str, second: str) -> Precision:
        return max(dtypes[first], dtypes[second], key=lambda dtype: tolerance_of(dtype, native))

    def compared(first: Any, second: Any) -> OrderedDict[str, LogitDifference]:
        tolerance = tolerance_of(coarser(first.runner_name, second.runner_name), native)
        return OrderedDict(logits=compare_logits("", first["logits"], second["logits"], tolerance))

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), contextlib.redirect_stdout(io.StringIO()):
        numbers = [{"call": np.array([number])} for number in range(len(calls))]
        results = Comparator.run(runners, data_loader=numbers, warm_up=0)
        pairs = list(combinations(range(len(engines)), 2))
        (report,) = Comparator.compare_accuracy(results, comparisons=pairs, compare_func=compared)
    faults = {runner.name: runner.faults for runner in runners}
    found = []
    for (first, second), outputs in report.items():
        dtype, cases = coarser(first, second), _by_case(calls, outputs, faults[first] | faults[second])
        found.append(ComparedPair(first, second, dtype, cases, tolerance_of(dtype, native), native, experts))
    return found


def compare_logits(case: str, expected: Array, got: Array, tolerance: float) -> LogitDifference:
    """How the logits of two engines differ in one call; the error is NaN if the shapes differ."""
    if expected.shape != got.shape:
        rows = max(expected.size // max(1, expected.shape[-1]), got.size // max(1, got.shape[-1]))
        return LogitDifference(case, rows, rows, np.nan, np.nan, 0.0, rows, None, tolerance)
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    first, other = expected.argmax(-1), got.argmax(-1)
    differ = first != other
    margins = np.diff(np.partition(expected, -2, axis=-1)[..., -2:], axis=-1)[..., 0][differ]
    largest = float(np.abs(expected).max(initial=0.0))
    return LogitDifference(
        case=case,
        rows=int(differ.size),
        beyond=int((~(error.max(-1, initial=0.0) <= tolerance * max(1.0, largest))).sum()),
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if error.size else 0.0,
        largest_logit=largest,
        disagreements=int(differ.sum()),
        margin=float(margins.min()) if margins.size else None,
        tolerance=tolerance,
    )


def merged(parts: Sequence[LogitDifference]) -> LogitDifference:
    """The differences of a case's calls as one: the worst error, and the mean error over all rows."""
    rows = sum(part.rows for part in parts)
    margins = [part.margin for part in parts if part.margin is not None]
    worst = max(parts, key=lambda part: part.excess)
    return LogitDifference(
        case=worst.case,
        rows=rows,
        beyond=sum(part.beyond for part in parts),
        max_error=worst.max_error,
        mean_error=sum(part.mean_error * part.rows for part in parts) / max(1, rows),
        largest_logit=worst.largest_logit,
        disagreements=sum(part.disagreements for part in parts),
        margin=min(margins, default=None),
        tolerance=worst.tolerance,
    )


def _by_case(
    calls: Sequence[RecordedCall], outputs: Sequence[Any], faults: Mapping[str, str]
) -> tuple[LogitDifference, ...]:
    parts: dict[str, list[LogitDifference]] = {}
    for call, output in zip(calls, outputs, strict=True):
        parts.setdefault(call.case, []).append(replace(output["logits"], case=call.case))
    return tuple(replace(merged(part), fault=faults.get(case)) for case, part in parts.items())


def write_report(bundle: Path, report: Mapping[str, Any]) -> None:
    """Write a report into a bundle atomically."""
    replace_text(bundle / ACCURACY_FILE, json.dumps(report, indent=2) + "\n")
