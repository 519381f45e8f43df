"""Accuracy: engines held against the PyTorch reference by Polygraphy, case by case."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from spaceport.graphs.manifest import ACCURACY_FILE
from spaceport.graphs.tolerance import TOLERANCE as TOLERANCE

Array = NDArray[Any]
# Runs the rows of one feed on an engine, which keeps its KV buffers from feed to feed; the logits, B x R x V.
Call = Callable[[Mapping[str, Array]], NDArray[np.float32]]


@dataclass(frozen=True)
class Feed:
    """The inputs of one call, the case that it belongs to, and what the reference made of it."""

    case: str
    arrays: dict[str, Array]
    expected: NDArray[np.float32]  # the reference's logits


@dataclass(frozen=True)
class Finding:
    """How an engine's logits differ from the reference's, in one call or over a case."""

    case: str
    rows: int
    max_error: float
    mean_error: float
    largest_logit: float
    disagreements: int  # rows whose top token differs
    margin: float | None  # smallest distance between the reference's first and second token where they differ
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.tolerance * max(1.0, self.largest_logit)  # NaN is not

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


class CallRunner(BaseRunner):  # type: ignore[misc]  # polygraphy ships no types
    """An engine as Polygraphy sees it."""

    def __init__(self, name: str, call: Call, like: Mapping[str, Array]) -> None:
        super().__init__(name=name)
        self._call = call
        self._like = like

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for name, array in self._like.items():
            metadata.add(name, dtype=array.dtype, shape=(None,) * array.ndim)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        started = time.perf_counter()
        logits = self._call(feed_dict).copy()
        self.inference_time = time.perf_counter() - started
        return OrderedDict(logits=logits)


def compare(engine: Call, feeds: Sequence[Feed], tolerance: float) -> list[Finding]:
    """One finding a case: every call of it on the engine, compared on all logits that were asked for."""
    like = feeds[0].arrays
    recorded = iter(feeds)
    runners = [
        CallRunner("reference", lambda arrays: next(recorded).expected, like),
        CallRunner("engine", engine, like),
    ]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), contextlib.redirect_stdout(io.StringIO()):
        results = Comparator.run(runners, data_loader=[feed.arrays for feed in feeds], warm_up=0)
        calls = iter(feeds)
        report = Comparator.compare_accuracy(
            results,
            compare_func=lambda expected, got: OrderedDict(
                logits=difference(next(calls).case, expected["logits"], got["logits"], tolerance)
            ),
        )
    (findings,) = report[0].values()
    by_case: dict[str, list[Finding]] = {}
    for iteration in findings:
        by_case.setdefault(iteration["logits"].case, []).append(iteration["logits"])
    return [together(parts) for parts in by_case.values()]


def difference(case: str, expected: Array, got: Array, tolerance: float) -> Finding:
    """How two calls' logits differ."""
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    first, other = expected.argmax(-1), got.argmax(-1)
    differ = first != other
    margins = np.diff(np.partition(expected, -2, axis=-1)[..., -2:], axis=-1)[..., 0][differ]
    return Finding(
        case=case,
        rows=int(differ.size),
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if error.size else 0.0,
        largest_logit=float(np.abs(expected).max(initial=0.0)),
        disagreements=int(differ.sum()),
        margin=float(margins.min()) if margins.size else None,
        tolerance=tolerance,
    )


def together(parts: Sequence[Finding]) -> Finding:
    """The calls of a case as one finding: its worst error, its mean over rows."""
    rows = sum(part.rows for part in parts)
    margins = [part.margin for part in parts if part.margin is not None]
    worst = max(
        parts, key=lambda part: np.inf if np.isnan(part.max_error) else part.max_error / max(1.0, part.largest_logit)
    )
    return Finding(
        case=worst.case,
        rows=rows,
        max_error=worst.max_error,
        mean_error=sum(part.mean_error * part.rows for part in parts) / max(1, rows),
        largest_logit=worst.largest_logit,
        disagreements=sum(part.disagreements for part in parts),
        margin=min(margins, default=None),
        tolerance=worst.tolerance,
    )


def write_report(bundle: Path, report: Mapping[str, Any]) -> None:
    """Put a report into a bundle, the old one staying until the new one is whole."""
    partial = bundle / f".{ACCURACY_FILE}.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    partial.replace(bundle / ACCURACY_FILE)
