"""Rounds: which steps share an engine call, how many rows requests get, and which prompts wait for another one's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.scheduling.prefix_cache import LEAST_COPIED
from spaceport.runtime.scheduling.request import Request

_REACH = 64  # maximum steps of different widths in one search; a longer search costs more than it saves
_SHARE = 2.0  # plain steps: maximum cost of all threads of requests with several threads together
_BLOCK = 64  # tokens that are compared at once


def group_by_width(steps: Sequence[RequestStep], call_rows: int) -> list[list[RequestStep]]:
    """The steps of each engine call; `steps` are in the order of their indices.

    A call computes the rows of its widest plan for each of its requests, also for idle requests between them. So steps of
    similar width share a call: they are sorted by width and split where the total cost is lowest, with a fixed cost of
    `call_rows` rows for each call.
    """
    if not steps:
        return []
    span = steps[-1].engine_index - steps[0].engine_index + 1
    rows = [step.rows for step in steps]
    if span * max(rows) <= sum(rows) + call_rows:  # the usual case: a second call could not save its own cost
        return [list(steps)]
    ordered = sorted(steps, key=lambda step: (step.rows, step.engine_index))
    widths = [(step.engine_index, step.rows) for step in ordered]
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


def fair_rows(costs: StepCosts) -> int:
    """Number of rows for which others wait in a round: they cost as much as two plain steps."""
    most = _SHARE * costs.seconds(1)
    return next((rows for rows in range(2, STEP_ROWS + 1) if costs.seconds(rows) > most), STEP_ROWS + 1) - 1


def find_leader(request: Request, running: Iterable[Request], reusable: int) -> tuple[Request | None, int]:
    """The request to wait for instead of computing a prompt alone, and the number of tokens that both begin with.

    `reusable` is the number of tokens whose rows are in KV buffers already. Requests that wait for another one lead none,
    so that no two wait for each other.
    """
    salt = request.sequences.cache_salt
    leader, longest = None, reusable + LEAST_COPIED - 1
    if salt is None:
        return leader, 0
    tokens = request.sequences.reusable
    for other in running:
        if other is request or other.leader is not None or not other.sequences.prefilling:
            continue
        if other.sequences.cache_salt == salt:
            common = _common(tokens, other.sequences.threads[0].tokens)
            if common > longest:
                leader, longest = other, common
    return leader, longest if leader is not None else 0


def has_computed(leader: Request, common: int) -> bool:
    """Whether a request has computed this many tokens of its prompt, or computes it no longer."""
    computes = leader.index is not None and not leader.done and leader.sequences.prefilling
    return not computes or leader.sequences.threads[0].fed >= common


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that two sequences begin with."""
    length, at = min(len(first), len(second)), 0
    while at < length and first[at : at + _BLOCK] == second[at : at + _BLOCK]:
        at += _BLOCK
    while at < length and first[at] == second[at]:
        at += 1
    return min(at, length)
