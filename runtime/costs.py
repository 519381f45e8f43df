"""Step costs: the seconds of a step by its rows, requests and visible KV slots, refined by the steps that run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

# Initial seconds of Python code for each request, draft and row; see docs/performance.md.
_OUTSIDE_REQUEST, _OUTSIDE_DRAFT, _OUTSIDE_ROW = 5e-5, 1e-4, 8e-6
_LEVEL, _POINT = 0.1, 0.02  # weight of a step for the overall speed, and for the nearest points of the table
_WRONG = 3  # large errors in a row that show that the table is wrong
_OBSERVE_EVERY = 8  # steps for each point: costs change slowly, and observing takes time
_RARE, _MOST_POINT = (
    0.01,
    0.5,
)  # weight of a step for a point, for each step since it was last corrected; and its maximum
_RIGHT = 0.1  # maximum error that confirms the table
_PLAIN_AFTER, _MOST_PLAIN_AFTER = 24, 1024  # steps with drafts until a plain step is measured again
_MOST_ERROR = 0.3  # a step that took longer than e^0.3 times the expected time was disturbed
_DISTURBED = 4  # times the expected time: Python code that takes longer was disturbed
_LEAST_SHARE = 0.2  # of the measured time: fewer visible slots save no more than the rest
_SHORTEST, _LONGEST = 1e-9, 1e6  # valid range of a call, in seconds
_CHANGED = 0.03  # smaller changes of the table do not trigger new plans

# Source of a runtime's step costs; "free": rows cost nothing.
CostSource = Literal["measured", "standard", "free"]
Points = tuple[tuple[int, float], ...]  # rows of each request, seconds; rows ascending


@dataclass(frozen=True)
class CostTable:
    """Measured costs of one engine."""

    visible: int  # visible KV slots of the measured calls
    single: Points  # calls of one request
    requests: int = 1  # number of requests in the batched calls
    batched: Points = ()  # calls of that number of requests; empty if the engine takes one
    slot: float = 0.0  # seconds for each further visible slot in a call of one row
    row_slot: float = 0.0  # the same for each further row

    def __post_init__(self) -> None:
        points = (*self.single, *self.batched)
        numbers = (self.slot, self.row_slot, *(seconds for _, seconds in points))
        ascending = all(list(map(_rows, each)) == sorted({*map(_rows, each)}) for each in (self.single, self.batched))
        if not self.single or not ascending or min(map(_rows, points)) < 1 or self.visible < 0 or self.requests < 1:
            raise ValueError("step costs: expected ascending numbers of rows, each at least 1")
        if not all(0 <= number <= _LONGEST for number in numbers) or min(s for _, s in points) < _SHORTEST:
            raise ValueError(f"step costs: expected seconds from {_SHORTEST:g} to {_LONGEST:g}")


def linear_table(row: float) -> CostTable:
    """A table in which a step of one row costs 1 and each further row `row`."""
    return CostTable(0, ((1, 1.0), (2, 1.0 + row)))


class StepCosts:
    """The expected seconds of steps on one engine; safe to read while another thread reports a step."""

    def __init__(self, table: CostTable, *, fixed: bool = False) -> None:
        self.table = table
        self.fixed = fixed  # steps do not refine the table, and Python code counts as free
        self._observed = 0  # steps
        self._seen: dict[tuple[bool, int], int] = {}  # step at which a point was last corrected
        self._since_plain, self._plain_after = 0, _PLAIN_AFTER  # steps
        self._wrong, self._last = 0, 0.0  # number of large errors of one sign in a row, and the last error
        self.version = 0  # changes when plans should be made again
        self._single = [log(seconds) for _, seconds in table.single]
        self._batched = [log(seconds) for _, seconds in table.batched]
        # Seconds of Python code: for each request, and for its draft.
        self._outside = [_OUTSIDE_REQUEST, _OUTSIDE_DRAFT]
        self._planned = self._shape()  # shape of this version

    def seconds(self, rows: int, requests: int = 1, visible: int | None = None) -> float:
        """Seconds of a step with this many rows for each of its requests, Python code included."""
        found = self._engine(rows, requests, visible)
        return found if self.fixed else found + self._beside(rows, requests)

    def curve(self, most: int, threads: int = 1, requests: int = 1, visible: int | None = None) -> list[float]:
        """A thread's share of a step's seconds if each thread has 1 to `most` rows."""
        sharers = threads * requests
        shared = [self.seconds(threads * rows, requests, visible) / sharers for rows in range(1, most + 1)]
        for index in range(1, most):  # noise: a wider step is never cheaper
            shared[index] = max(shared[index], shared[index - 1])
        return shared

    @property
    def call_rows(self) -> int:
        """Number of rows that cost as much as the fixed part of a call."""
        one, many = self._engine(1), self._engine(33)
        return min(1024, max(1, round(32 * one / max(many - one, one / 32))))

    def observe(self, rows: int, requests: int, visible: int, seconds: float) -> None:
        """Refine the table by a call that ran; `seconds` is its time in the engine."""
        if self.fixed or not seconds > 0:
            return
        table = self.table
        points, logs = (table.single, self._single) if requests == 1 else (table.batched, self._batched)
        if not points or rows > 2 * points[-1][0]:  # a prefill chunk
            return
        self._observed += 1
        self._since_plain = 0 if rows == 1 else self._since_plain + 1
        nearest = requests > 1, _bracket(points, rows)[0]
        unseen = self._observed - self._seen.get(nearest, 0)
        if unseen < _OBSERVE_EVERY and not self._wrong:
            return
        self._seen[nearest] = self._observed
        found = log(seconds / self._engine(rows, requests, visible))
        error = _clipped(found)
        # A single larger error is a disturbance; several of the same sign show that the table is wrong.
        self._wrong = self._wrong + 1 if abs(found) > _MOST_ERROR and found * self._last > 0 else 0
        self._last = found
        if self._wrong >= _WRONG and rows == 1:  # the whole machine has become slower or faster
            _shift(self._single, _MOST_POINT * found)
            _shift(self._batched, _MOST_POINT * found)
        elif self._wrong >= _WRONG:
            _correct(logs, points, rows, _MOST_POINT * found)
        if rows == 1:
            self._plain_after = min(_MOST_PLAIN_AFTER, 2 * self._plain_after) if abs(error) < _RIGHT else _PLAIN_AFTER
        _shift(self._single, _LEVEL * error)
        _shift(self._batched, _LEVEL * error)
        weight = _POINT if unseen < _PLAIN_AFTER else min(_MOST_POINT, _RARE * unseen)
        _correct(logs, points, rows, weight * error)
        shape = self._shape()
        if any(abs(now - then) > _CHANGED for now, then in zip(shape, self._planned, strict=True)):
            self._planned = shape
            self.version += 1

    def take_plain_step(self) -> bool:
        """Whether the next step should be plain, to measure the baseline of drafts; it becomes rarer while the table is right."""
        if self.fixed or self._since_plain < self._plain_after:
            return False
        self._since_plain = 0
        return True

    def observe_outside(self, rows: int, requests: int, seconds: float) -> None:
        """Refine the seconds of Python code around a call."""
        if self.fixed or not seconds > 0:
            return
        seconds = min(seconds, _DISTURBED * self._beside(rows, requests)) / requests
        if rows == 1:
            self._outside[0] += _LEVEL * (seconds - self._outside[0])
        else:
            draft = max(0.0, seconds - self._outside[0] - _OUTSIDE_ROW * (rows - 1))
            self._outside[1] += _LEVEL * (draft - self._outside[1])

    def _beside(self, rows: int, requests: int) -> float:
        """Seconds of Python code around a call."""
        draft = self._outside[1] + _OUTSIDE_ROW * (rows - 1) if rows > 1 else 0.0
        return requests * (self._outside[0] + draft)

    def _shape(self) -> list[float]:
        """All costs relative to the narrowest call, on which plans depend."""
        level = self._single[0]
        points = [point - level for point in (*self._single, *self._batched)]
        return points + [seconds / exp(level) for seconds in self._outside]

    def _engine(self, rows: int, requests: int = 1, visible: int | None = None) -> float:
        table = self.table
        found = _interpolated(table.single, self._single, rows * requests)
        if requests > 1 and table.batched:
            apart = _interpolated(table.batched, self._batched, rows)
            same = _interpolated(table.single, self._single, rows * table.requests)
            found *= 1 + (apart / same - 1) * min(1.0, (requests - 1) / (table.requests - 1))
        if visible is not None:
            slots = max(visible - table.visible, -table.visible // 2)  # the slope does not hold for very short texts
            found = max(_LEAST_SHARE * found, found + slots * requests * (table.slot + table.row_slot * (rows - 1)))
        return found


def fixed_costs(row: float) -> StepCosts:
    """Costs that nothing refines: every further row of a step costs `row` steps of one row."""
    return StepCosts(linear_table(row), fixed=True)


def _rows(point: tuple[int, float]) -> int:
    return point[0]


def _clipped(error: float) -> float:
    return max(-_MOST_ERROR, min(_MOST_ERROR, error))


def _shift(logs: list[float], by: float) -> None:
    for index in range(len(logs)):
        logs[index] += by


def _correct(logs: list[float], points: Points, rows: int, by: float) -> None:
    """Move the points on both sides of a number of rows, the nearer one more."""
    left, share = _bracket(points, rows)
    logs[left] += by * (1 - min(1.0, share))
    if share > 0:
        logs[left + 1] += by * min(1.0, share)


def _bracket(points: Points, rows: int) -> tuple[int, float]:
    """The point at or before a number of rows, and how far that is on the way to the next; beyond the last one: > 1."""
    if len(points) == 1 or rows <= points[0][0]:
        return 0, 0.0
    left = min(bisect_left(points, rows, key=_rows) - 1, len(points) - 2)
    return left, (rows - points[left][0]) / (points[left + 1][0] - points[left][0])


def _interpolated(points: Points, logs: Sequence[float], rows: int) -> float:
    left, share = _bracket(points, rows)
    first = exp(logs[left])
    return first + share * max(0.0, exp(logs[left + 1]) - first) if share else first
