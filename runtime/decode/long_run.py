"""The value of available draft tokens when all later steps are planned optimally.

The mask slots of a step provide the draft tokens of the next one. The value of a step is therefore the tokens that it
generates plus the value of the draft tokens that it leaves. Value iteration on a small model computes it: the state is
the number of available draft tokens, in a chain; the action is the best draft tree for them; the reward is the expected
number of tokens less what the same time yields otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from spaceport.runtime.costs import Curve
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig
from spaceport.runtime.decode.tree import Outlook, tree

_ROUNDS = 30  # of value iteration; about four are enough to converge
_CLOSE = 1e-3  # relative change of the rate that counts as none
_LONG = 1 << 30  # tokens that a text may still get


class LongRun(NamedTuple):
    """The best token rate, and the value of available draft tokens at that rate."""

    rate: float  # tokens per plain step
    gains: tuple[float, ...]  # tokens; value of the first, the second, ... available draft token


def solve(curve: Curve, reach: Sequence[float], draft_config: DraftConfig, start: LongRun | None = None) -> LongRun:
    """The long run for `reach`, the probability that the first, the first two, ... draft tokens are all accepted.

    It takes fewer rounds from the solution for similar probabilities.
    """
    run = start or LongRun(1.0, (0.0,) * len(reach))
    for _ in range(_ROUNDS):
        drafts = best_drafts(curve, reach, draft_config, run)
        times = [curve.times[draft.rows - 1] for draft in drafts]
        values = [draft.worth[-1] - run.rate * time for draft, time in zip(drafts, times, strict=True)]
        worth = list(accumulate(values, max))  # verifying fewer than available is allowed
        rate = max(run.rate + worth[0] / times[0], 1.0)
        gains = _concave([0.0, *accumulate(min(b - a, 1.0) for a, b in pairwise(worth))])
        changed = max((abs(a - b) for a, b in zip(gains, run.gains, strict=True)), default=0.0)
        settled = abs(rate - run.rate) <= _CLOSE * rate and changed <= 10 * _CLOSE
        # half way: gains and rate depend on each other, and whole steps may swing for ever
        run = LongRun(rate, tuple([(now + before) / 2 for now, before in zip(gains, run.gains, strict=True)]))
        if settled:
            break
    return run


def best_drafts(curve: Curve, reach: Sequence[float], draft_config: DraftConfig, run: LongRun) -> list[Draft]:
    """The best draft for each number of available draft tokens, from 0 on."""
    before = [1.0, *reach]
    chain = [Candidates((0,), (now / max(last, 1e-9),)) for last, now in zip(before, reach, strict=False)]
    outlook = Outlook(curve, run.rate, run.gains)
    rows = len(curve.times)
    return [tree(chain[:at_hand], (), draft_config, _LONG, rows, outlook) for at_hand in range(len(reach) + 1)]


def best_rate(curve: Curve, reach: Sequence[float]) -> float:
    """Tokens per plain step with the best number of verified draft tokens, if every step leaves all of them."""
    tokens = accumulate(reach, initial=1.0)
    return max(count / time for count, time in zip(tokens, curve.times, strict=False))


def _concave(worth: Sequence[float]) -> list[float]:
    """The slopes of the lowest concave curve above a rising one.

    Where a few rows cost nearly as much as many, one draft token has no value and several have a high one; each then gets
    its share of it.
    """
    steps: list[float] = []
    at = 0
    while at < len(worth) - 1:
        slope, end = max(((worth[end] - worth[at]) / (end - at), end) for end in range(at + 1, len(worth)))
        steps += [slope] * (end - at)
        at = end
    return steps
