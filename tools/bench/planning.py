"""Planning: the step times of a cost table, and the best drafts for given acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.runtime.costs import Curve, StepCosts
from spaceport.runtime.decode.draft import Draft, DraftConfig, Outlook, tree
from spaceport.runtime.decode.planner import ChainProposal, LongRun, chances_of, solve

ROWS = (1, 2, 4, 6, 9, 12, 16, 24, 36, 64)
MOST_ROWS = 64
_LONG = 1 << 30  # tokens that a text may still get


@dataclass(frozen=True)
class PlannedRows:
    """The time of a step with a number of rows per request."""

    rows: int
    milliseconds: float
    ratio: float  # to a step with one row per request


@dataclass(frozen=True)
class PlannedStep:
    """The best step for a number of available draft tokens."""

    at_hand: int
    masks: tuple[int, ...]  # mask slots behind the last known token, and behind each draft token that is verified
    tokens: float  # expected tokens that the step generates
    time: float
    rows: int


@dataclass(frozen=True)
class PlannedDrafts:
    """The best drafts for one table of acceptance rates."""

    acceptance: tuple[float, ...]  # acceptance rate by depth, given that the token before was accepted
    speedup: float  # over plain decoding
    tokens_per_step: float
    steps: tuple[PlannedStep, ...]  # by number of available draft tokens


def step_times(costs: StepCosts, requests: int, visible: int) -> list[PlannedRows]:
    """Step times by number of rows."""
    one = costs.seconds(1, requests, visible)
    return [
        PlannedRows(rows, seconds * 1e3, seconds / one)
        for rows, seconds in ((rows, costs.seconds(rows, requests, visible)) for rows in ROWS)
    ]


def drafts_of(
    costs: StepCosts,
    acceptance: Sequence[float],
    mask_slots: int,
    requests: int,
    visible: int,
    mask_layout: MaskLayout = CAUSAL,
) -> PlannedDrafts:
    """The best drafts for these acceptance rates; deeper mask slots have the last rate."""
    rates, reach = _by_depth(acceptance, mask_slots)
    curve = costs.curve(MOST_ROWS, requests=requests, visible=visible)
    limits = DraftConfig(mask_slots, rows=MOST_ROWS, siblings=1, mask_layout=mask_layout)
    solution = solve(curve, reach, mask_layout)
    steps = tuple(
        PlannedStep(at_hand, draft.masks, 1 + sum(reach[: len(draft.tokens)]), curve.times[draft.rows - 1], draft.rows)
        for at_hand, draft in enumerate(best_drafts(curve, reach, limits, solution))
    )
    return PlannedDrafts(rates, solution.rate, solution.rate * _mean_time(steps, reach), steps)


def drafts_of_heads(
    costs: StepCosts, acceptance: Sequence[float], heads: int, requests: int, visible: int
) -> PlannedDrafts:
    """The best number of draft tokens from heads, which take no rows of their own and predict all of them in every step."""
    rates, reach = _by_depth(acceptance, heads)
    times = costs.curve(MOST_ROWS, requests=requests, visible=visible).times
    expected = enumerate(accumulate(reach, initial=1.0))
    choices = [
        PlannedStep(heads, (0,) * (verified + 1), tokens, times[verified], verified + 1)
        for verified, tokens in expected
    ]
    best = max(choices, key=lambda step: step.tokens / step.time)
    return PlannedDrafts(rates, best.tokens / best.time, best.tokens, (best,))


def best_drafts(curve: Curve, reach: Sequence[float], draft_config: DraftConfig, run: LongRun) -> list[Draft]:
    """The best draft for each number of available draft tokens, from 0 on."""
    chances = chances_of(reach)
    outlook, rows = Outlook(curve, run.rate, run.gains), len(curve.times)
    return [
        tree((ChainProposal(chances[:at_hand]),), draft_config, _LONG, rows, outlook)
        for at_hand in range(len(reach) + 1)
    ]


def _by_depth(acceptance: Sequence[float], depths: int) -> tuple[tuple[float, ...], list[float]]:
    """The acceptance rate of each depth, and the probability that all tokens up to it are accepted."""
    rates = tuple(acceptance[min(depth, len(acceptance) - 1)] for depth in range(depths))
    return rates, list(accumulate(rates, mul))


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
