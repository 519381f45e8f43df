"""Timing: measures the step costs of an engine before it serves requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from operator import attrgetter
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np

from spaceport.runtime.costs import Points, StepCosts
from spaceport.runtime.engine import Batch, Engine

SECONDS = 2.0  # of a measurement; the widths in _NEEDED are timed a few times in any case
_ROUNDS, _FEWEST = 7, 3  # calls of each shape: usual and minimum number
_MOST_ROUNDS = 60
_QUICK = SECONDS / 4  # more rounds are run for this time: short calls are disturbed more often
_VISIBLE, _FAR = 256, 1024  # KV slots
# The most informative first: with a large model there is no time for all. GPU times jump at 8/9, 17, 33 and 64 rows.
_SINGLE = (1, 4, 16, 9, 36, 2, 24, 6, 12, 64, 8, 17, 33)
_BATCHED = (1, 4, 9)
_FAR_ROWS = (1, 16)
_MOST_REQUESTS = 8  # maximum requests of a call: more of them take long and show little more
_NEEDED = (1, 4)  # always timed: with one point alone, rows would look free
_LEAST_ROW = 0.01  # minimum cost of a further row on a CPU, relative to a one-row call; less is a disturbed measurement


class _Shape(NamedTuple):
    rows: int
    requests: int
    visible: int


def measure(
    engine: Engine,
    budget: float = SECONDS,
    clock: Callable[[], float] = perf_counter,
    cpu_clock: Callable[[], float] = thread_time,
) -> StepCosts:
    """The costs of an engine's calls; shapes alternate, so that a busy machine affects all alike.

    Calls on a CPU are timed with the CPU time of this thread: other processes do not add to it, and it waits actively for
    the engine's other threads.
    """
    deadline = clock() + budget
    timer = cpu_clock if engine.device == "cpu" else clock
    times: dict[_Shape, list[float]] = {}
    for shape in _shapes(engine):  # the first call of a shape compiles and captures: its time does not count
        again = _FEWEST * sum(map(min, times.values()))  # time of a few more rounds
        if shape.rows not in _NEEDED and clock() + again + 2 * max(map(min, times.values())) > deadline:
            break
        _call(engine, shape, timer)
        times[shape] = [_call(engine, shape, timer)]
    started = clock()
    for number in count():
        if (number >= _ROUNDS and clock() - started > _QUICK) or number == _MOST_ROUNDS:
            break
        buffers: tuple[int, int] | None = None
        for shape in sorted(times, key=attrgetter("visible", "requests", "rows")):
            found = times[shape]
            if clock() + found[-1] > deadline and (number >= _FEWEST - 1 or shape.rows not in _NEEDED):
                continue
            if buffers != shape[1:]:  # a call with other KV buffers than the one before binds them
                _call(engine, shape, timer)
                buffers = shape[1:]
            found.append(_call(engine, shape, timer))
    return _table(engine, times)


def idle(engine: Engine, rows: int, requests: int = 1, visible: int = _VISIBLE) -> Batch:
    """A call that computes like any other and writes to unused slots."""
    visible = min(visible, engine.capacity)
    ids = np.zeros((requests, rows), np.int64)
    mask = np.zeros((requests, 1, rows, visible), np.bool_)
    mask[..., 0] = True
    slots = np.broadcast_to(np.arange(visible - rows, visible), ids.shape).copy()
    wanted = np.broadcast_to(np.arange(rows), ids.shape).copy()
    return Batch(0, ids, ids, slots, mask, wanted, mask if engine.signature.window else None)


def batched_requests(engine: Engine) -> int:
    """The number of requests in the batched calls of an engine's table."""
    return min(engine.requests, _MOST_REQUESTS)


def _shapes(engine: Engine) -> Iterator[_Shape]:
    near, far = min(_VISIBLE, engine.capacity), min(_FAR, engine.capacity)
    for rows in _SINGLE:
        if rows <= min(engine.rows, near):
            yield _Shape(rows, 1, near)
            if rows in _BATCHED and engine.requests > 1:
                yield _Shape(rows, batched_requests(engine), near)
    for rows in _FAR_ROWS if far >= 2 * near else ():
        if rows <= min(engine.rows, near):
            yield _Shape(rows, 1, far)


def _call(engine: Engine, shape: _Shape, clock: Callable[[], float]) -> float:
    batch = idle(engine, shape.rows, shape.requests, shape.visible)
    started = clock()
    engine.run(batch)
    return max(clock() - started, 1e-9)


def _table(engine: Engine, times: dict[_Shape, list[float]]) -> StepCosts:
    seconds = {shape: min(found) for shape, found in times.items()}  # disturbances only make calls longer
    near = min(shape.visible for shape in seconds)
    least = _LEAST_ROW if engine.device == "cpu" else 0.0
    single = _points(seconds, 1, near, least)
    further = {
        shape.rows: max(0.0, (found - seconds[shape._replace(visible=near)]) / (shape.visible - near))
        for shape, found in seconds.items()
        if shape.visible > near
    }
    slot = further.get(1, 0.0)
    rows = max(further, default=1)
    row_slot = max(0.0, further[rows] - slot) / (rows - 1) if rows > 1 else 0.0
    requests = batched_requests(engine)
    batched = _points(seconds, requests, near, least) if requests > 1 else ()
    return StepCosts(near, single, requests, batched, slot, row_slot)


def _points(seconds: dict[_Shape, float], requests: int, visible: int, least: float) -> Points:
    """The points of calls of one kind; a narrower call never takes longer, and each row costs at least `least`."""
    found: list[tuple[int, float]] = []
    for shape, time in sorted(seconds.items(), reverse=True):
        if (shape.requests, shape.visible) == (requests, visible):
            found.append((shape.rows, min(time, found[-1][1] if found else time)))
    found.reverse()
    return tuple((rows, max(time, found[0][1] * (1 + least * requests * (rows - 1)))) for rows, time in found)
