"""The expected seconds of steps on one engine, by rows, requests and visible KV slots.

The table is measured by the first three openings of a bundle and never changes while steps run, so plans never depend
on a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

# CPU seconds of Python code around a call: for each request, for each draft, and for each further row; and
# for planning a draft that turns out empty. Measured with `spaceport bench outside --real`.
_PYTHON_REQUEST, _PYTHON_DRAFT, _PYTHON_ROW, _PYTHON_EMPTY = 5e-5, 1e-4, 8e-6, 4e-5
_WARM = 1e-3  # seconds of a call; longer ones evict Python's code from the caches, which then takes up to twice as long
_LEAST_SHARE = 0.2  # of the measured time: fewer visible slots save no more than the rest
_SHORTEST, _LONGEST = 1e-9, 1e6  # valid range of a call, in seconds
VISIBLE = 128  # visible KV slots are rounded up to the next multiple of this for a curve

# Source of a runtime's step costs; "free": rows cost nothing.
CostSource = Literal["measured", "standard", "free"]
Points = tuple[tuple[int, float], ...]  # rows of each request, seconds; rows ascending


@dataclass(frozen=True, eq=False)
class Curve:
    """A thread's share of the time of a step by its number of rows, in plain steps."""

    times: Sequence[float]  # of 1, 2, ... rows; the first is 1
    plain: float = 1.0  # time of a plain step
    planning: float = 0.0  # time of planning a draft that turns out empty

    @cached_property
    def slopes(self) -> list[float]:
        """By number of rows: the lowest average time per further row of any wider step."""
        slopes: list[float] = []
        for rows, time in enumerate(self.times, 1):
            wider = enumerate(self.times[rows:], 1)
            slopes.append(min(((later - time) / more for more, later in wider), default=float("inf")))
        return slopes

    @cached_property
    def least(self) -> float:
        """The lowest time of a further row in any step."""
        return min(self.slopes)


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of one engine."""

    visible: int  # visible KV slots of the measured calls
    single: Points  # calls of one request
    requests: int = 1  # number of requests in the batched calls
    batched: Points = ()  # calls of that number of requests; empty if the engine takes one
    slot: float = 0.0  # seconds for each further visible slot in a call of one row
    row_slot: float = 0.0  # the same for each further row
    relative: bool = False  # times are in plain steps, to which the seconds of Python code cannot be added

    def __post_init__(self) -> None:
        points = (*self.single, *self.batched)
        numbers = (self.slot, self.row_slot, *(seconds for _, seconds in points))
        ascending = all(list(map(_rows, kind)) == sorted({*map(_rows, kind)}) for kind in (self.single, self.batched))
        if not self.single or not ascending or min(map(_rows, points)) < 1 or self.visible < 0 or self.requests < 1:
            raise ValueError("step costs: expected ascending numbers of rows, each at least 1")
        if not all(0 <= number <= _LONGEST for number in numbers) or min(s for _, s in points) < _SHORTEST:
            raise ValueError(f"step costs: expected seconds from {_SHORTEST:g} to {_LONGEST:g}")

    def seconds(self, rows: int, requests: int = 1, visible: int | None = None, threads: int = 1) -> float:
        """Seconds of a step with this many rows for each of its requests, of `threads` threads, Python code included."""
        call = self.call_seconds(rows, requests, visible)
        if self.relative:
            return call
        drafts = threads * _PYTHON_DRAFT if rows > threads else 0.0
        return call + self._python * requests * (_PYTHON_REQUEST + drafts + _PYTHON_ROW * (rows - 1))

    def call_seconds(self, rows: int, requests: int = 1, visible: int | None = None) -> float:
        """Seconds of an engine call with this many rows for each of its requests."""
        call = _interpolated(self.single, rows * requests)
        if requests > 1 and self.batched:
            apart, same = _interpolated(self.batched, rows), _interpolated(self.single, rows * self.requests)
            call *= 1 + (apart / same - 1) * min(1.0, (requests - 1) / (self.requests - 1))
        if visible is not None:
            slots = max(visible - self.visible, -self.visible // 2)  # the slope does not hold for very short texts
            call = max(_LEAST_SHARE * call, call + slots * requests * (self.slot + self.row_slot * (rows - 1)))
        return call

    @property
    def _python(self) -> float:
        """Factor for the seconds of Python code."""
        return max(1.0, min(2.0, self.single[0][1] / _WARM))

    @property
    def call_rows(self) -> int:
        """Number of rows that cost as much as the fixed part of a call."""
        narrow, wide = self.call_seconds(1), self.call_seconds(33)
        return min(1024, max(1, round(32 * narrow / max(wide - narrow, narrow / 32))))

    def curve(self, most: int, threads: int = 1, requests: int = 1, visible: int = 1) -> Curve:
        """A thread's share of a step's time if each thread has 1 to `most` rows."""
        visible = (visible // VISIBLE + 1) * VISIBLE
        seconds = [self.seconds(threads * rows, requests, visible, threads) for rows in range(1, most + 1)]
        for index in range(1, most):  # noise: a wider step is never cheaper
            seconds[index] = max(seconds[index], seconds[index - 1])
        plain = seconds[0] / (threads * requests)
        return Curve(
            [time / seconds[0] for time in seconds],
            plain,
            0.0 if self.relative else self._python * _PYTHON_EMPTY / plain,
        )


def lowest(first: StepCosts, second: StepCosts) -> StepCosts:
    """The lower times of two measurements of one engine, since disturbances only make calls longer."""
    quieter = min(first, second, key=lambda costs: costs.single[0][1])
    single, batched = (_lower(*kind) for kind in ((first.single, second.single), (first.batched, second.batched)))
    return replace(quieter, single=single, batched=batched)


def _lower(first: Points, second: Points) -> Points:
    times = dict(first)
    for rows, seconds in second:
        times[rows] = min(seconds, times.get(rows, seconds))
    return ascending(times.items())


def ascending(times: Iterable[tuple[int, float]]) -> Points:
    """Points in the order of their rows, where a narrower call never takes longer."""
    points: list[tuple[int, float]] = []
    for rows, seconds in sorted(times, reverse=True):
        points.append((rows, min(seconds, points[-1][1] if points else seconds)))
    return tuple(reversed(points))


def relative_costs(row: float) -> StepCosts:
    """Costs that were not measured: a step of one row costs 1 and each further row `row`."""
    return StepCosts(0, ((1, 1.0), (2, 1.0 + row)), relative=True)


def _rows(point: tuple[int, float]) -> int:
    return point[0]


def _interpolated(points: Points, rows: int) -> float:
    """The seconds of this many rows, on the line between two points or beyond the last ones; more rows never take less."""
    if len(points) == 1 or rows <= points[0][0]:
        return points[0][1]
    left = min(bisect_left(points, rows, key=_rows) - 1, len(points) - 2)
    (low, first), (high, last) = points[left : left + 2]
    return first + (rows - low) / (high - low) * max(0.0, last - first)
