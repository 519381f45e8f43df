"""Choice: which token logits mean in a line of text, and what may not be written there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.selector import not_a_number
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.selection import SelectedRows

_LEAST = -7.0  # a candidate whose logit is so far below the best is not worth a row in any tree
_LEAST_ODDS = 2e-3  # nor one with such odds
_LEAST_PROBABILITY = 1e-3  # the same of candidates whose probability is known exactly
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

    def among_candidates(self, thread: Thread) -> frozenset[int]:
        """What no mask slot of a thread needs to propose, whatever stands before it."""
        return self._no_fork if self.fork is not None and len(thread.path) >= self.depth else self.never

    @cached_property
    def _no_fork(self) -> frozenset[int]:
        return self.never if self.fork is None else self.never | {self.fork}


@dataclass(frozen=True)
class Greedy:
    """The likeliest token that is not banned; of equals the lowest id."""

    bans: Bans
    selects: ClassVar = True

    def token(self, logits: NDArray[np.float32] | SelectedRows, thread: Thread, ahead: Sequence[int]) -> int:
        if isinstance(logits, SelectedRows):
            best = logits.best(self.bans.at(thread, ahead))
            return self.token(logits.logits[0], thread, ahead) if best is None else best[0]
        token = int(logits.argmax())
        if (score := logits[token]) != score:  # NaN, at a fraction of the price of np.isnan
            raise not_a_number(len(thread.tokens) + len(ahead))
        if token in (banned := self.bans.at(thread, ahead)):
            token = int(without(logits, banned).argmax())
        return token

    def candidates(
        self, logits: NDArray[np.float32] | SelectedRows, thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        banned = self.bans.among_candidates(thread)
        if isinstance(logits, SelectedRows):
            if most > 1:
                return tuple([_candidates(ranked) for ranked in logits.probable(most, _LEAST_PROBABILITY, banned)])
            if (known := logits.best(banned)) is not None:
                return tuple([Candidates((token,), (1.0,)) for token in known])
            return self.candidates(logits.logits, thread, position, most)
        if most > 1:
            return likeliest(logits, most, banned)
        best = logits.argmax(axis=-1).tolist()
        if not banned.isdisjoint(best):
            best = without(logits, banned).argmax(axis=-1).tolist()
        return tuple(Candidates((token,), (1.0,)) for token in best)


def greedy(banned: Collection[int] = ()) -> Greedy:
    """The likeliest token but for these."""
    return Greedy(Bans(frozenset(banned)))


def without(logits: NDArray[np.float32], banned: Collection[int]) -> NDArray[np.float32]:
    """A copy of logits in which these tokens are impossible."""
    allowed: NDArray[np.float32] = logits.copy()
    allowed[..., list(banned)] = -np.inf
    return allowed


def likeliest(scores: NDArray[np.float32], most: int, banned: Collection[int] = ()) -> tuple[Candidates, ...]:
    """The best tokens of each line of scores, and about how likely a softmax over the line makes them.

    All but a few tokens of a line are too unlikely to be looked at; what they weigh together is taken from a sample. A
    line that says nothing gives no tokens.
    """
    with np.errstate(all="ignore"):  # what is not a number is nobody's guess
        return tuple([_likeliest(line, most, banned) for line in scores])


def _likeliest(line: NDArray[np.float32], most: int, banned: Collection[int]) -> Candidates:
    highest = line[line.argmax()]
    sampled = line[::_SAMPLE] - highest
    likely = sampled > _LEAST
    weights = np.exp(sampled, out=sampled)
    least = _LEAST
    if np.count_nonzero(likely) > _MANY // _SAMPLE:
        least = np.log(weights.sum() * _SAMPLE * _LEAST_ODDS)
        likely = weights > weights.sum() * _SAMPLE * _LEAST_ODDS
    weights[likely] = 0
    tokens = (line > highest + least).nonzero()[0]
    found = np.exp(line[tokens] - highest).tolist()
    total = sum(found) + float(weights.sum()) * _SAMPLE
    return _best(tokens.tolist(), found, total, most, banned)


def _candidates(ranked: list[tuple[int, float]]) -> Candidates:
    return Candidates(tuple([token for token, _ in ranked]), tuple([probabilities for _, probabilities in ranked]))


def _best(tokens: list[int], weights: list[float], total: float, most: int, banned: Collection[int]) -> Candidates:
    """The guess that the likely tokens of a line make, by what they and all others weigh."""
    order = sorted(range(len(tokens)), key=weights.__getitem__, reverse=True)  # of equals the lowest id comes first
    allowed = [index for index in order[: most + len(banned)] if tokens[index] not in banned][:most]
    return Candidates(tuple([tokens[index] for index in allowed]), tuple([weights[index] / total for index in allowed]))
