"""Choice: which token logits mean in a line of text, and what may not be written there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Guess
from spaceport.runtime.decode.selector import not_a_number
from spaceport.runtime.decode.threads import Thread

_LEAST = -7.0  # a candidate whose logit is so far below the best is not worth a row in any tree
_LEAST_ODDS = 2e-3  # nor one with such odds
_MANY = 512  # tokens near the best: a line with more says little, and is held to odds instead
_SAMPLE = 32  # one token in so many is looked at to tell what the unlikely ones weigh


@dataclass(frozen=True)
class Bans:
    """The tokens that may not be written, everywhere or in some places."""

    never: frozenset[int]
    fork: int | None = None  # may not follow itself nor [Child], nor be written by threads that are too deep
    child: int | None = None
    depth: int = 0  # how often the way to a thread may fork

    def at(self, thread: Thread, ahead: Sequence[int]) -> frozenset[int]:
        """What may not follow these tokens of a thread."""
        if self.fork is None:
            return self.never
        last = ahead[-1] if ahead else thread.tokens[-1]
        if last == self.fork or last == self.child or len(thread.path) >= self.depth:
            return self._no_fork
        return self.never

    def among_guesses(self, thread: Thread) -> frozenset[int]:
        """What no mask slot of a thread needs to propose, whatever stands before it."""
        return self._no_fork if self.fork is not None and len(thread.path) >= self.depth else self.never

    @cached_property
    def _no_fork(self) -> frozenset[int]:
        return self.never if self.fork is None else self.never | {self.fork}


@dataclass(frozen=True)
class Greedy:
    """The likeliest token that is not banned; of equals the lowest id."""

    bans: Bans

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        token = int(logits.argmax())
        if np.isnan(logits[token]):
            raise not_a_number(len(thread.tokens) + len(ahead))
        if token in (banned := self.bans.at(thread, ahead)):
            token = int(without(logits, banned).argmax())
        return token

    def guesses(self, logits: NDArray[np.float32], thread: Thread, place: int, most: int) -> tuple[Guess, ...]:
        banned = self.bans.among_guesses(thread)
        if most > 1:
            return likeliest(logits, most, banned)
        best = logits.argmax(axis=-1).tolist()
        if not banned.isdisjoint(best):
            best = without(logits, banned).argmax(axis=-1).tolist()
        return tuple(Guess((token,), (1.0,)) for token in best)


def greedy(banned: Collection[int] = ()) -> Greedy:
    """The likeliest token but for these."""
    return Greedy(Bans(frozenset(banned)))


def without(logits: NDArray[np.float32], banned: Collection[int]) -> NDArray[np.float32]:
    """A copy of logits in which these tokens are impossible."""
    allowed: NDArray[np.float32] = logits.copy()
    allowed[..., list(banned)] = -np.inf
    return allowed


def likeliest(scores: NDArray[np.float32], most: int, banned: Collection[int] = ()) -> tuple[Guess, ...]:
    """The best tokens of each line of scores, and about how likely a softmax over the line makes them.

    All but a few tokens of a line are too unlikely to be looked at; what they weigh together is taken from a sample. A
    line that says nothing gives no tokens.
    """
    with np.errstate(all="ignore"):  # what is not a number is nobody's guess
        highest = scores.max(axis=-1, keepdims=True)
        below = scores[:, ::_SAMPLE] - highest
        weights = np.exp(below) * _SAMPLE
        flat = np.count_nonzero(below > _LEAST, axis=-1) * _SAMPLE > _MANY
        least = np.where(flat, np.log(weights.sum(axis=-1) * _LEAST_ODDS), _LEAST)[:, None]
        rest = np.where(below > least, 0, weights).sum(axis=-1)
        owners, tokens = np.divmod(np.flatnonzero(scores > highest + least), scores.shape[1])
        found = np.exp(scores[owners, tokens] - highest[owners, 0])
    ends = np.searchsorted(owners, np.arange(len(scores) + 1)).tolist()
    return tuple(
        _best(tokens[first:last], found[first:last], float(rest[line]), most, banned)
        for line, (first, last) in enumerate(pairwise(ends))
    )


def _best(
    tokens: NDArray[np.int64], weights: NDArray[np.float32], rest: float, most: int, banned: Collection[int]
) -> Guess:
    """The guess that the likely tokens of a line make, and what the others weigh."""
    order = np.argsort(-weights, kind="stable")[: most + len(banned)]
    total = float(weights.sum()) + rest
    ranked = zip(tokens[order].tolist(), weights[order].tolist(), strict=True)
    allowed = [(token, weight / total) for token, weight in ranked if token not in banned][:most]
    return Guess(tuple(token for token, _ in allowed), tuple(odds for _, odds in allowed))
