"""Long run: the value of available draft tokens when all later steps are planned optimally.

The mask slots of a step provide the draft tokens of the next one. The value of a step is therefore the tokens that it
generates plus the value of the draft tokens that it leaves. Value iteration on a small model computes it: the state is
the number of available draft tokens, in a chain; an action verifies some of them and puts mask slots behind each; the
reward is the expected number of tokens less what the same time yields otherwise.

Lists instead of arrays: a round runs between two engine calls, which evict NumPy's code from the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

_ROUNDS = 60  # of value iteration; fewer are enough to converge
_CLOSE = 1e-3  # relative change of the rate that counts as none


class PlannedStep(NamedTuple):
    """The best step for a number of available draft tokens."""

    at_hand: int
    masks: tuple[int, ...]  # mask slots behind the last known token, and behind each draft token that is verified
    tokens: float  # expected tokens that the step generates
    time: float
    rows: int


class _Best(NamedTuple):
    """The best step that verifies a number of draft tokens."""

    value: float  # expected tokens, plus the value of the draft tokens left, less what the time yields otherwise
    mask_rows: int  # in total
    time: float


@dataclass
class LongRun:
    """The best token rate, and the value of available draft tokens at that rate; improved round by round."""

    mask_slots: int
    lead: int = 0  # rows of a group of mask slots beside theirs
    rate: float = 0.0  # tokens per unit of time of the curves; 0: unknown
    gains: list[float] = field(
        default_factory=list
    )  # tokens; value of the first, the second, ... available draft token
    settled: bool = False  # the last round changed nothing

    def __post_init__(self) -> None:
        self.gains = self.gains or [0.0] * self.mask_slots

    def copy(self) -> LongRun:
        """A copy that is improved separately."""
        return replace(self, gains=list(self.gains))

    def solve(self, curve: Sequence[float], reach: Sequence[float], rounds: int = _ROUNDS) -> LongRun:
        """Improve until nothing changes."""
        for _ in range(rounds):
            self.improve(curve, reach)
            if self.settled:
                break
        return self

    def improve(self, curve: Sequence[float], reach: Sequence[float]) -> None:
        """One round of value iteration.

        `curve` is the time of a step by its rows, 1 row first. `reach` is the probability that the first, the first two,
        ... draft tokens from mask slots are all accepted, in falling order.
        """
        self.rate = self.rate or 1 / curve[0]
        steps = self._steps(curve, reach)
        worth = list(accumulate((step.value for step in steps), max))  # verifying fewer than available is allowed
        rate = max(self.rate + worth[0] / steps[0].time, 1 / curve[0])
        gains = _concave([0.0, *accumulate(min(b - a, 1.0) for a, b in pairwise(worth))])
        changed = max((abs(a - b) for a, b in zip(gains, self.gains, strict=True)), default=0.0)
        self.settled = abs(rate - self.rate) <= _CLOSE * rate and changed <= 10 * _CLOSE
        self.rate, self.gains = rate, gains

    def policy(self, curve: Sequence[float], reach: Sequence[float]) -> list[PlannedStep]:
        """The best step for each number of available draft tokens, from 0 on."""
        steps, policy = self._steps(curve, reach), []
        for at_hand in range(self.mask_slots + 1):
            verified = max(range(at_hand + 1), key=lambda count: steps[count].value)
            masks = self._spread(_last(reach, verified), steps[verified].mask_rows)
            rows = verified + 1 + steps[verified].mask_rows
            policy.append(PlannedStep(at_hand, masks, 1 + sum(reach[:verified]), steps[verified].time, rows))
        return policy

    def _spread(self, last: Sequence[float], mask_rows: int) -> tuple[int, ...]:
        """The number of mask slots behind each node if these mask rows stand where their value is highest."""
        offers = self._offers()
        offered = sorted((-share * gain, -rows, node) for node, share in enumerate(last) for gain, rows in offers)
        found = [0] * len(last)
        for _, negative, node in offered:
            rows = -negative
            if rows > mask_rows:
                break
            mask_rows -= rows
            found[node] += rows
        return tuple([max(0, rows - self.lead) for rows in found])

    def _offers(self) -> list[tuple[float, int]]:
        """The rows of a group that are added together, in their order: their average value and their number."""
        gains = [gain for gain in self.gains if gain > 0]
        if not self.lead or not gains:
            return [(gain, 1) for gain in gains]
        openings = opening_gains(gains, self.lead)
        first = 1 + openings.index(openings[-1])
        return [(openings[-1], first + self.lead), *((gain, 1) for gain in gains[first:])]

    def _steps(self, curve: Sequence[float], reach: Sequence[float]) -> list[_Best]:
        """The best step by number of verified draft tokens, with mask slots where their value is highest."""
        steps, tokens, offers, most = [], 1.0, self._offers(), len(curve)
        reached = [1.0, *reach]
        before: list[tuple[float, int]] = []  # the best offers behind the nodes before the last one
        for verified in range(min(self.mask_slots, len(curve) - 1) + 1):
            if verified:
                tokens += reached[verified]
                last = reached[verified - 1] - reached[verified]
                before = _best_first(before + [(last * gain, rows) for gain, rows in offers], most)
            worth = _best_first(before + [(reached[verified] * gain, rows) for gain, rows in offers], most)
            value, time, count = tokens, curve[verified], 0
            best = _Best(value - self.rate * time, 0, time)
            for gain, rows in worth:
                count += rows
                if verified + count >= len(curve):
                    break
                value, time = value + gain * rows, curve[verified + count]
                if value - self.rate * time > best.value:
                    best = _Best(value - self.rate * time, count, time)
            steps.append(best)
        return steps + [steps[-1]] * (self.mask_slots + 1 - len(steps))


def _best_first(offers: list[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """The best offers, of which no step can have more; sorting lists that are sorted in parts is fast."""
    offers.sort(reverse=True)
    return offers[:most]


def opening_gains(gains: Sequence[float], lead: int) -> list[float]:
    """By maximum number of mask slots: the highest average value of a row if a group is opened, with its `lead` rows."""
    sums = accumulate(gains)
    return list(accumulate((total / (count + lead) for count, total in enumerate(sums, 1)), max))


def best_rate(curve: Sequence[float], reach: Sequence[float]) -> float:
    """Tokens per unit of time with the best number of verified draft tokens, if every step leaves all of them."""
    tokens = accumulate(reach, initial=1.0)
    return max(count / time for count, time in zip(tokens, curve, strict=False))


def _last(reach: Sequence[float], verified: int) -> list[float]:
    """The probability that each node is the last accepted one, from the last known token on."""
    reached = [1.0, *reach[:verified]]
    return [now - after for now, after in zip(reached, [*reached[1:], 0.0], strict=True)]


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
