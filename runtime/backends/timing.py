"""Timing: what the calls of an engine take, measured when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from spaceport.runtime.engine import Batch, Costs, Engine

ROWS = 36  # of the wide call: a usual draft, and a width that no engine fills up
_WARM, _ROUNDS = 4, 9  # calls before and while a call is timed; the first ones load, compile and capture
_VISIBLE = 256

_LEAST_ROW = 0.0005  # a lower cost cannot be told from noise
_MOST_CALL_ROWS = 1024


def timed(engine: Engine, clock: Callable[[], float] = perf_counter) -> Costs:
    """The costs of an engine's calls, measured behind a short text on a request that nobody uses yet."""

    def seconds(rows: int) -> float:
        batch, times = idle(engine, rows), []
        for _ in range(_WARM + _ROUNDS):
            started = clock()
            engine.run(batch)
            times.append(clock() - started)
        return median(times[_WARM:])

    return measured(seconds, min(ROWS, engine.rows))


def measured(seconds: Callable[[int], float], rows: int = 32) -> Costs:
    """The costs of an engine, from the seconds that its calls take by their number of rows."""
    one, many = seconds(1), seconds(rows)
    row = max(_LEAST_ROW, (many / one - 1) / (rows - 1))
    return Costs(row, min(_MOST_CALL_ROWS, max(1, round(1 / row))))


def idle(engine: Engine, rows: int) -> Batch:
    """A call that computes as any other, and writes what nobody sees."""
    ids = np.zeros((1, rows), np.int64)
    mask = np.zeros((1, 1, rows, min(_VISIBLE, engine.capacity)), np.bool_)
    mask[..., 0] = True
    slots = np.arange(engine.capacity - rows, engine.capacity)[None]
    near = mask if engine.signature.window else None
    return Batch(0, ids, ids, slots, mask, np.arange(rows)[None], near)
