"""Calls: which steps of a round share one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.runtime.decode.request import ScheduledStep

_REACH = 64  # steps of different widths among which a call is sought; more would take longer than they save


def group_by_width(steps: Sequence[ScheduledStep], call_rows: int) -> list[list[ScheduledStep]]:
    """The steps that share a call of the engine; they are given in the order of their indices.

    A call computes as many rows for each of its requests as its widest plan has, also for requests between them that
    take no part. So steps of similar width share a call: sorted by width, they are cut where the total cost is lowest,
    with a call costing as much as `call_rows` rows.
    """
    if not steps:
        return []
    span = steps[-1].engine_index - steps[0].engine_index + 1
    rows = [step.plan.rows for step in steps]
    if span * max(rows) <= sum(rows) + call_rows:  # the usual case: no second call could save its own cost
        return [list(steps)]
    ordered = sorted(steps, key=lambda step: (step.plan.rows, step.engine_index))
    places = [(step.engine_index, step.plan.rows) for step in ordered]
    found, end = [], len(ordered)
    begins = _cuts(places, call_rows)
    while end:
        call = ordered[begins[end] : end]
        found.append(sorted(call, key=lambda step: step.engine_index))
        end = begins[end]
    return found[::-1]


def _cuts(places: Sequence[tuple[int, int]], call_rows: int) -> list[int]:
    """Begin of the last call over the first N steps, for each N; a step is its index and its number of rows."""
    best, begins = [0], [0]  # lowest cost of the first N steps
    lowest = highest = places[0][0]
    for end, (index, rows) in enumerate(places, 1):
        low = high = index
        lowest, highest = min(lowest, index), max(highest, index)
        costs = [((highest - lowest + 1) * rows + call_rows, 0)]  # all in one
        for begin in range(end - 1, max(0, end - _REACH), -1):
            index = places[begin][0]
            low, high = min(low, index), max(high, index)
            costs.append((best[begin] + (high - low + 1) * rows + call_rows, begin))
        cost, begin = min(costs)  # of equals the one with the fewest calls
        best.append(cost)
        begins.append(begin)
    return begins
