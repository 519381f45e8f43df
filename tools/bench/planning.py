"""Planning: the step times of a cost table, and the best drafts for given acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.long_run import LongRun, PlannedStep

ROWS = (1, 2, 4, 6, 9, 12, 16, 24, 36, 64)
MOST_ROWS = 64


@dataclass(frozen=True)
class PlannedRows:
    """The time of a step with a number of rows per request."""

    rows: int
    milliseconds: float
    ratio: float  # to a step with one row per request


@dataclass(frozen=True)
class PlannedDrafts:
    """The best drafts for one table of acceptance rates."""

    acceptance: tuple[float, ...]  # acceptance rate by depth, given that the token before was accepted
    speedup: float  # over plain decoding
    tokens_per_step: float
    steps: tuple[PlannedStep, ...]  # by number of available draft tokens


def rows_of(costs: StepCosts, requests: int, visible: int) -> list[PlannedRows]:
    """Step times by number of rows."""
    one = costs.seconds(1, requests, visible)
    return [
        PlannedRows(rows, seconds * 1e3, seconds / one)
        for rows, seconds in ((rows, costs.seconds(rows, requests, visible)) for rows in ROWS)
    ]


def drafts_of(
    costs: StepCosts, acceptance: Sequence[float], mask_slots: int, requests: int, visible: int, lead: int = 0
) -> PlannedDrafts:
    """The best drafts for these acceptance rates; deeper mask slots have the last rate.

    `lead` is the number of rows of a group beside those of its mask slots.
    """
    rates = tuple(acceptance[min(depth, len(acceptance) - 1)] for depth in range(mask_slots))
    reach = list(accumulate(rates, mul))
    seconds = costs.curve(MOST_ROWS, requests=requests, visible=visible)
    times = [each / seconds[0] for each in seconds]
    solution = LongRun(mask_slots, lead).solve(times, reach)
    steps = tuple(solution.policy(times, reach))
    return PlannedDrafts(rates, solution.rate, solution.rate * _mean_time(steps, reach), steps)


def _mean_time(steps: Sequence[PlannedStep], reach: Sequence[float], rounds: int = 200) -> float:
    """The mean step time in the long run, where the mask slots of each step yield the draft tokens of the next."""
    reached = [1.0, *reach, 0.0]
    shares = [1.0] + [0.0] * (len(steps) - 1)  # probability of each number of available draft tokens
    total = [0.0] * len(steps)
    for _ in range(rounds):
        after = [0.0] * len(steps)
        for share, step in zip(shares, steps, strict=True):
            verified = len(step.masks) - 1
            for node, masks in enumerate(step.masks):
                after[masks] += share * (reached[node] - (reached[node + 1] if node < verified else 0.0))
        shares = after
        total = [sum(pair) for pair in zip(total, shares, strict=True)]
    return sum(count * step.time for count, step in zip(total, steps, strict=True)) / rounds
