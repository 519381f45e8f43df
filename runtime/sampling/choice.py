"""Greedy token selection, candidates of mask slots with their correction, and bans."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CANDIDATES, CorrectionTables
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence, not_a_number
from spaceport.runtime.engine import SelectedRows

_LEAST = -7.0  # logit of a candidate relative to the best; less is never worth a row
_LEAST_SHARE = 2e-3  # estimated probability of a candidate; less is never worth a row
_LEAST_PROBABILITY = 1e-3  # the same where the probability is known exactly
_MANY = 512  # tokens near the best; if there are more, the limit on probabilities applies instead
_SAMPLE = 32  # one token in 32 is sampled to estimate the weight of improbable ones


@dataclass(frozen=True)
class Bans:
    """The tokens that must not be generated, everywhere or at some positions."""

    never: frozenset[int]
    fork: int | None = None  # must not follow itself or [Child], and is banned in threads that are too deep
    child: int | None = None
    depth: int = 0  # maximum number of forks from the root thread to a thread
    ends: frozenset[int] = frozenset()  # tokens that end a thread, banned before a position
    ends_from: int = 0  # this position; 0: they are not banned

    def at(self, thread: TokenSequence, ahead: Sequence[int]) -> frozenset[int]:
        """The banned tokens after these tokens of a thread."""
        early = len(thread.tokens) + len(ahead) < self.ends_from
        if self.fork is not None:
            last = ahead[-1] if ahead else thread.tokens[-1]
            if last == self.fork or last == self.child or len(thread.path) >= self.depth:
                return self.anywhere if early else self._no_fork
        return self._no_end if early else self.never

    def among_candidates(self, thread: TokenSequence) -> frozenset[int]:
        """Tokens that no mask slot of a thread may propose, whatever is before it."""
        return self._no_fork if self.fork is not None and len(thread.path) >= self.depth else self.never

    @cached_property
    def _no_fork(self) -> frozenset[int]:
        return self.never if self.fork is None else self.never | {self.fork}

    @cached_property
    def _no_end(self) -> frozenset[int]:
        return self.never | self.ends

    @cached_property
    def anywhere(self) -> frozenset[int]:
        """The tokens that are banned at any position."""
        return self._no_fork | self.ends


@dataclass(frozen=True)
class Greedy:
    """Greedy selection: the most probable token that is not banned; the lowest id among equals."""

    bans: Bans
    selects: ClassVar = True

    def token(self, logits: NDArray[np.float32] | SelectedRows, thread: TokenSequence, ahead: Sequence[int]) -> int:
        if isinstance(logits, SelectedRows):
            best = logits.best(self.bans.at(thread, ahead))
            return self.token(logits.logits[0], thread, ahead) if best is None else best[0]
        token = int(logits.argmax())
        if token in self.bans.anywhere and math.isfinite(logits[token]):
            logits = without(logits, self.bans.at(thread, ahead))
            token = int(logits.argmax())
        if not math.isfinite(logits[token]):  # much faster than np.isfinite
            raise not_a_number(len(thread.tokens) + len(ahead))
        return token

    def candidates(
        self, logits: NDArray[np.float32] | SelectedRows, thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        banned = self.bans.among_candidates(thread)
        if isinstance(logits, SelectedRows):
            if most > 1:
                return tuple([_candidates(ranked) for ranked in logits.probable(most, _LEAST_PROBABILITY, banned)])
            if (known := logits.best(banned)) is not None:
                return tuple([Candidates((token,), (1.0,)) for token in known])
            return self.candidates(logits.logits, thread, position, most)
        if most > 1:
            return top_candidates(logits, most, banned)
        best = logits.argmax(axis=-1).tolist()
        if not banned.isdisjoint(best):
            best = without(logits, banned).argmax(axis=-1).tolist()
        return tuple(Candidates((token,), (1.0,)) for token in best)


def without(logits: NDArray[np.float32], banned: Collection[int]) -> NDArray[np.float32]:
    """A copy of logits in which these tokens are impossible."""
    allowed: NDArray[np.float32] = logits.copy()
    allowed[..., list(banned)] = -np.inf
    return allowed


def top_candidates(
    scores: NDArray[np.float32], most: int, banned: AbstractSet[int] = frozenset()
) -> tuple[Candidates, ...]:
    """The best tokens of each line of scores with estimated softmax probabilities.

    Only a few tokens of a line matter; the weight of the others is estimated from a sample of them. A line without a
    probable token gives no candidates.
    """
    candidates_of_lines = []
    with np.errstate(all="ignore"):  # NaN gives no candidates
        for line in scores:
            candidates = _top_candidates(line, most, banned)
            if candidates is None:  # the probabilities are those of the tokens that are left
                return top_candidates(without(scores, banned), most)
            candidates_of_lines.append(candidates)
    return tuple(candidates_of_lines)


def _top_candidates(line: NDArray[np.float32], most: int, banned: AbstractSet[int]) -> Candidates | None:
    """The best tokens of a line, best first, the lowest id among equals; None if a banned token is near the best."""
    highest = line[line.argmax()]
    sampled = line[::_SAMPLE] - highest
    likely = sampled > _LEAST
    weights = np.exp(sampled, out=sampled)
    least = _LEAST
    many = likely.nonzero()[0].size > _MANY // _SAMPLE
    if many:
        share = np.add.reduce(weights) * _SAMPLE * _LEAST_SHARE
        least = np.log(share)
        likely = weights > share
    weights[likely] = 0
    tokens = (line > highest + least).nonzero()[0]
    if banned and ((line[list(banned)] > highest + _LEAST).any() if many else not banned.isdisjoint(tokens.tolist())):
        return None
    scores = line[tokens]
    near = np.exp(scores - highest)
    total = sum(near.tolist()) + float(np.add.reduce(weights)) * _SAMPLE
    order = (-scores).argsort(kind="stable")[:most]  # by score, since the weights of close scores are equal
    chosen = near[order].tolist()
    return Candidates(tuple(tokens[order].tolist()), tuple([weight / total for weight in chosen]))


def _candidates(ranked: list[tuple[int, float]]) -> Candidates:
    return Candidates(tuple([token for token, _ in ranked]), tuple([probabilities for _, probabilities in ranked]))


@dataclass(frozen=True)
class CorrectedCandidates(Candidates):
    """The most probable tokens of a mask slot; `behind` corrects their probabilities and returns the best of them."""

    tables: CorrectionTables
    most: int  # number of tokens to return
    _known: dict[int, Candidates] = field(default_factory=dict, compare=False, repr=False)

    def behind(self, token: int) -> Candidates:
        corrected = self._known.get(token)
        if corrected is None:
            corrected = self._known[token] = self._behind(token) if self.tokens else self
        return corrected

    def _behind(self, token: int) -> Candidates:
        vectors = self.tables.after[list(self.tokens)].astype(np.float32)
        corrections = vectors @ self.tables.before[token].astype(np.float32)
        probabilities = np.array(self.probabilities)
        weights = probabilities * np.exp(corrections - corrections.max())
        if not (total := weights.sum()) > 0:
            return Candidates(self.tokens[: self.most], self.probabilities[: self.most])
        weights *= probabilities.sum() / total
        order = np.argsort(-weights, kind="stable")[: self.most]
        return Candidates(tuple([self.tokens[index] for index in order]), tuple(weights[order].tolist()))


@dataclass(frozen=True)
class Corrected:
    """A token selector that corrects the candidates of another one; the tokens that it selects are the same."""

    inner: TokenSelector
    tables: CorrectionTables

    @property
    def selects(self) -> bool:
        """Whether the inner selector takes `SelectedRows`."""
        return getattr(self.inner, "selects", False)

    def token(self, logits: NDArray[np.float32] | SelectedRows, thread: TokenSequence, ahead: Sequence[int]) -> int:
        return self.inner.token(logits, thread, ahead)  # type: ignore[arg-type]

    def candidates(
        self, logits: NDArray[np.float32] | SelectedRows, thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        inner = self.inner.candidates(logits, thread, position, max(most, CANDIDATES))  # type: ignore[arg-type]
        return tuple([CorrectedCandidates(own.tokens, own.probabilities, self.tables, most) for own in inner])
