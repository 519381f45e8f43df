"""Long run: what draft tokens at hand are worth when every later step is planned as well as it can be.

The mask slots of a step give the draft tokens of the next one, so a step is worth the tokens that it writes and the
draft tokens that it leaves behind. Their worth is found by value iteration on a small model: its state is the number
of draft tokens at hand, in a chain; an action verifies some of them and puts mask slots behind each; its reward is the
expected number of tokens less what the same seconds yield otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 60  # of value iteration; it converges in fewer
_CLOSE = 1e-4  # relative change of the rate that is none


class PlannedStep(NamedTuple):
    """The best step for a number of draft tokens at hand."""

    at_hand: int
    masks: tuple[int, ...]  # mask slots behind the last known token, and behind each draft token that is verified
    tokens: float  # that the step writes, on average
    time: float

    @property
    def rows(self) -> int:
        return len(self.masks) + sum(self.masks)


@dataclass
class LongRun:
    """The best rate of tokens, and the worth of draft tokens at hand at that rate; improved round by round."""

    mask_slots: int
    rate: float = 0.0  # tokens for the unit of time of the curves
    gains: NDArray[np.float64] = field(init=False)  # tokens; worth of the first, the second, ... draft token at hand

    def __post_init__(self) -> None:
        self.gains = np.zeros(self.mask_slots)

    def copy(self) -> LongRun:
        """The same, to be improved on its own."""
        other = LongRun(self.mask_slots, self.rate)
        other.gains = self.gains
        return other

    def solve(self, curve: Sequence[float], reach: Sequence[float]) -> LongRun:
        """Improve until nothing changes."""
        for _ in range(_ROUNDS):
            before = self.rate
            self.improve(curve, reach)
            if abs(self.rate - before) <= _CLOSE * self.rate:
                break
        return self

    def improve(self, curve: Sequence[float], reach: Sequence[float]) -> None:
        """One round of value iteration.

        `curve` is the time of a step by its rows, 1 row first. `reach` is the probability that the first, the first two,
        ... draft tokens from mask slots are all accepted; it falls.
        """
        times = np.asarray(curve)
        if not self.rate:
            self.rate = 1 / times[0]
        values, best = self._best(times, np.asarray(reach[: self.mask_slots]))
        states = np.maximum.accumulate(values)  # verifying fewer than there are is allowed
        spent = times[best[0]]
        self.gains = np.array(_concave([0.0, *np.minimum(np.diff(states), 1.0).cumsum().tolist()]))
        self.rate = max(self.rate + states[0] / spent, 1 / times[0])

    def policy(self, curve: Sequence[float], reach: Sequence[float]) -> list[PlannedStep]:
        """The best step for each number of draft tokens at hand, from none on."""
        times, reached = np.asarray(curve), np.asarray(reach[: self.mask_slots])
        values, best = self._best(times, reached)
        steps = []
        for at_hand in range(self.mask_slots + 1):
            verified = int(values[: at_hand + 1].argmax())
            worth = (_last_accepted(reached)[verified, : verified + 1, None] * self.gains).ravel()
            chosen = np.argsort(-worth, kind="stable")[: best[verified]]
            masks = np.bincount(chosen // max(1, self.mask_slots), minlength=verified + 1)
            tokens = 1 + float(reached[:verified].sum())
            steps.append(PlannedStep(at_hand, tuple(masks.tolist()), tokens, float(times[verified + masks.sum()])))
        return steps

    def _best(
        self, times: NDArray[np.float64], reach: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """By number of verified draft tokens: the value of the best step, and its number of mask slots."""
        tokens, rows = _actions(reach, self.gains)
        inside = np.minimum(rows, times.size)
        values = np.where(rows == inside, tokens - self.rate * times[inside - 1], -np.inf)
        best = values.argmax(axis=1)
        return values[np.arange(len(best)), best], best


def _concave(worth: Sequence[float]) -> list[float]:
    """The steps of the lowest concave curve above a rising one.

    Where a few rows cost nearly as much as many, single draft tokens are worth nothing and several are worth a lot; a mask
    slot then counts as its share of these.
    """
    steps: list[float] = []
    at = 0
    while at < len(worth) - 1:
        slope, end = max(((worth[end] - worth[at]) / (end - at), end) for end in range(at + 1, len(worth)))
        steps += [slope] * (end - at)
        at = end
    return steps


def _actions(reach: NDArray[np.float64], gains: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Tokens, with the worth of those left at hand, and rows: by verified draft tokens, then by mask slots in all.

    Mask slots stand where they are worth the most.
    """
    count = reach.size
    reached = np.concatenate(([1.0], reach))
    worth = np.sort((_last_accepted(reach)[:, :, None] * gains).reshape(count + 1, -1), axis=1)[:, ::-1]
    masked = np.concatenate((np.zeros((count + 1, 1)), worth.cumsum(axis=1)), axis=1)
    tokens = reached.cumsum()[:, None] + masked
    rows = np.arange(1, count + 2)[:, None] + np.arange(masked.shape[1])
    return tokens, rows


def _last_accepted(reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability that a node is the last accepted one: by number of verified draft tokens, then by node."""
    reached = np.concatenate(([1.0], reach))
    last = np.tril(np.broadcast_to(reached - np.append(reached[1:], 0.0), (reached.size, reached.size)))
    np.fill_diagonal(last, reached)
    return last
