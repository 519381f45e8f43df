"""Choice: which token logits mean in a line of text, and what may not be written there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.draft import Guess
from spaceport.runtime.threads import Thread

_UNLIKELY = 7.0  # a candidate whose logit is so far below the best is not worth a row in any tree
_SAMPLE = 32  # one token in so many is looked at to tell what the unlikely ones weigh


class NotANumber(RuntimeError):
    """An engine gave logits that are not numbers."""


class Choose(Protocol):
    """Says which tokens logits mean: for the same line of text and the same logits always the same."""

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        """The token that follows a thread's tokens and those `ahead` of them, which this step has chosen already."""

    def guesses(self, logits: NDArray[np.float32], thread: Thread, place: int, most: int) -> tuple[Guess, ...]:
        """At most so many tokens for each line of logits, the first of which is for this place of the thread."""


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


def not_a_number(place: int) -> NotANumber:
    """The error for logits that hold NaN."""
    return NotANumber(
        f"the logits for the token at place {place} hold NaN: `spaceport check` on the bundle tells whether the "
        "export or the engine is at fault; a float16 model that overflows needs --dtype float32 at its export"
    )


def without(logits: NDArray[np.float32], banned: Collection[int]) -> NDArray[np.float32]:
    """A copy of logits in which these tokens are impossible."""
    allowed: NDArray[np.float32] = logits.copy()
    allowed[..., list(banned)] = -np.inf
    return allowed


def likeliest(scores: NDArray[np.float32], most: int, banned: Collection[int] = ()) -> tuple[Guess, ...]:
    """The best tokens of each line of scores, and about how likely a softmax over the line makes them.

    All but a few tokens of a line are too unlikely to be looked at; what they weigh together is taken from a sample.
    """
    lines, size = scores.shape
    highest = scores.max(axis=-1, keepdims=True)
    places = np.flatnonzero(scores > highest - _UNLIKELY)
    owners, tokens = np.divmod(places, size)
    below = scores[:, ::_SAMPLE] - highest
    rest = np.where(below > -_UNLIKELY, 0, np.exp(below)).sum(axis=-1) * _SAMPLE
    weights = np.exp(scores[owners, tokens] - highest[owners, 0])
    found = []
    for line in range(lines):
        first, last = np.searchsorted(owners, (line, line + 1)).tolist()
        own = weights[first:last]
        order = np.argsort(-own, kind="stable")[: most + len(banned)]
        best, odds = tokens[first:last][order].tolist(), (own[order] / (own.sum() + rest[line])).tolist()
        allowed = [place for place, token in enumerate(best) if token not in banned][:most]
        found.append(Guess(tuple(best[place] for place in allowed), tuple(odds[place] for place in allowed)))
    return tuple(found)
