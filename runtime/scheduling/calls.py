"""Calls: groups the steps of a round into engine calls."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.runtime.decode.request import ScheduledStep

_REACH = 64  # maximum steps of different widths in one search; a longer search costs more than it saves


def group_by_width(steps: Sequence[ScheduledStep], call_rows: int) -> list[list[ScheduledStep]]:
    """The steps of each engine call; `steps` are in the order of their indices.

    A call computes the rows of its widest plan for each of its requests, also for idle requests between them. So steps of
    similar width share a call: they are sorted by width and split where the total cost is lowest, with a fixed cost of
    `call_rows` rows for each call.
    """
    if not steps:
        return []
    span = steps[-1].engine_index - steps[0].engine_index + 1
    rows = [step.plan.rows for step in steps]
    if span * max(rows) <= sum(rows) + call_rows:  # the usual case: a second call could not save its own cost
        return [list(steps)]
    ordered = sorted(steps, key=lambda step: (step.plan.rows, step.engine_index))
    widths = [(step.engine_index, step.plan.rows) for step in ordered]
    found, end = [], len(ordered)
    begins = _cuts(widths, call_rows)
    while end:
        call = ordered[begins[end] : end]
        found.append(sorted(call, key=lambda step: step.engine_index))
        end = begins[end]
    return found[::-1]


def _cuts(widths: Sequence[tuple[int, int]], call_rows: int) -> list[int]:
    """Start of the last call over the first N steps, for each N; a step is its index and its number of rows."""
    best, begins = [0], [0]  # lowest cost of the first N steps
    lowest = highest = widths[0][0]
    for end, (index, rows) in enumerate(widths, 1):
        low = high = index
        lowest, highest = min(lowest, index), max(highest, index)
        costs = [((highest - lowest + 1) * rows + call_rows, 0)]  # all in one
        for begin in range(end - 1, max(0, end - _REACH), -1):
            index = widths[begin][0]
            low, high = min(low, index), max(high, index)
            costs.append((best[begin] + (high - low + 1) * rows + call_rows, begin))
        cost, begin = min(costs)  # the fewest calls among equals
        best.append(cost)
        begins.append(begin)
    return begins
