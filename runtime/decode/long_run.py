"""Long run: what draft tokens at hand are worth when every later step is planned as well as it can be.

The mask slots of a step give the draft tokens of the next one, so a step is worth the tokens that it writes and the
draft tokens that it leaves behind. Their worth is found by value iteration on a small model: its state is the number
of draft tokens at hand, in a chain; an action verifies some of them and puts mask slots behind each; its reward is the
expected number of tokens less what the same seconds yield otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 60  # of value iteration; it converges in fewer
_CLOSE = 1e-4  # relative change of the rate that is none


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
        tokens, rows = _actions(np.asarray(reach[: self.mask_slots]), self.gains)
        inside = np.minimum(rows, times.size)
        values = np.where(rows == inside, tokens - self.rate * times[inside - 1], -np.inf)
        best = values.argmax(axis=1)  # number of mask slots, for each number of verified draft tokens
        values = values[np.arange(len(best)), best]
        states = np.maximum.accumulate(values)  # verifying fewer than there are is allowed
        spent = times[rows[0, best[0]] - 1]
        self.gains = np.array(_concave([0.0, *np.minimum(np.diff(states), 1.0).cumsum().tolist()]))
        self.rate = max(self.rate + states[0] / spent, 1 / times[0])


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
    last = np.tril(np.broadcast_to(reached - np.append(reached[1:], 0.0), (count + 1, count + 1)))
    np.fill_diagonal(last, reached)
    worth = np.sort((last[:, :, None] * gains).reshape(count + 1, -1), axis=1)[:, ::-1]
    masked = np.concatenate((np.zeros((count + 1, 1)), worth.cumsum(axis=1)), axis=1)
    tokens = reached.cumsum()[:, None] + masked
    rows = np.arange(1, count + 2)[:, None] + np.arange(masked.shape[1])
    return tokens, rows
