"""Learned probabilities that draft tokens are accepted, by source and depth.

Every generated token shows whether each source had predicted it, also if it was not drafted. Only mask slots have to be
fed to be measured. Heads count as mask slots here: a bundle has one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance, is_copying, lookup_kind
from spaceport.runtime.decode.draft import Candidates

_NEW, _PRIOR = 0.1, 4  # minimum weight of a step in an average; steps that the initial values count for
_HOPE = 0.5  # how far rates of mask slots start back towards their initial values in a new request
_RETRY = 0.003  # share per step by which rates of unused mask slots return to their initial values, to be tried again
_LEAST_TRUST, _MOST_TRUST = 0.1, 1.5
# Initial rates where a bundle has none: of mask slots; of prompt lookup after 2, 3 or 4 matching tokens, and after few or
# many accepted tokens in a row.
_MASKS = tuple(0.7 * 0.85**depth for depth in range(64))
USUAL_LOOKUP = (0.3, 0.45, 0.6, 0.85, 0.95)


class Acceptance:
    """Acceptance probabilities: moving averages over the steps of one request, or of all that share them."""

    def __init__(self, depths: int, measured: DraftAcceptance | None = None) -> None:
        """Start with the rates that a bundle brings, or with usual ones; `depths` is the number of mask slots or heads."""
        measured = measured or DraftAcceptance(())
        rates, lookup = measured.rates or _MASKS, measured.lookup or USUAL_LOOKUP
        self.initial = [*rates, *rates[-1:] * depths][:depths]
        # by depth: how often mask slots added that many tokens to those of prompt lookup; then: while text is copied
        self.masks = list(self.initial), list(self.initial)
        self.promised = list(self.initial)  # by depth: probability that mask slots gave to their best token
        self.accepted = list(self.initial)  # by depth: how often that token was accepted, behind an accepted one
        self.lookup = list(lookup)  # by kind of match
        self.steps = 0

    def copy(self) -> Acceptance:
        """A copy that a new request starts with; another thread may change the original meanwhile.

        Mask slots start half way back to their initial rates: how well they predict differs between texts, and a trial
        costs little.
        """
        copy = Acceptance(len(self.initial))
        copy.initial = self.initial
        copy.follow(self, 1.0)
        for masks in copy.masks:
            masks[:] = [rate + _HOPE * max(0.0, first - rate) for rate, first in zip(masks, self.initial, strict=True)]
        return copy

    def follow(self, other: Acceptance, weight: float) -> None:
        """Move all averages towards those of another one."""
        for own, theirs in zip(self._averages(), other._averages(), strict=True):
            own[:] = [a + weight * (b - a) for a, b in zip(own, theirs, strict=True)]

    def reach(self, copying: bool) -> list[float]:
        """The probability that mask slots or heads add one token, two tokens, ... to those of prompt lookup."""
        return list(accumulate(self.masks[copying], min))

    def trust(self, depth: int) -> float:
        """Factor that corrects the probabilities that mask slots give at a depth."""
        return min(_MOST_TRUST, max(_LEAST_TRUST, self.accepted[depth] / max(self.promised[depth], 1e-9)))

    def lookup_probabilities(self, equal: int, copied: int, count: int) -> list[float]:
        """Acceptance probability of each lookup token behind accepted ones.

        `equal` is the number of matching tokens before them, `copied` how many of these were correct lookup tokens.
        """
        return [self.lookup[lookup_kind(equal + depth, copied + depth)] for depth in range(count)]

    def learn(
        self,
        lookup_tokens: Sequence[int],
        equal: int,
        copied: int,
        candidates: Sequence[Candidates],
        written: Sequence[int],
    ) -> int:
        """Learn from the tokens that a step generated; returns the number of correct lookup tokens."""
        self.steps += 1
        weight = max(_NEW, 1 / (self.steps + _PRIOR))
        looked_up = _common(lookup_tokens, written)
        for depth in range(min(looked_up + 1, len(lookup_tokens), len(written))):
            kind = lookup_kind(equal + depth, copied + depth)
            self.lookup[kind] += weight * ((depth < looked_up) - self.lookup[kind])
        best = [candidate.tokens[0] for candidate in takewhile(lambda candidate: candidate.tokens, candidates)]
        right = _common(best, written)
        for depth in range(min(right + 1, len(best), len(written))):
            self.promised[depth] += weight * (candidates[depth].probabilities[0] - self.promised[depth])
            self.accepted[depth] += weight * ((depth < right) - self.accepted[depth])
        self._learn_masks(right - looked_up, len(candidates), len(written), is_copying(copied), weight)
        return looked_up

    def _learn_masks(self, added: int, candidates: int, written: int, copying: bool, weight: float) -> None:
        """Learn that mask slots added tokens to those of prompt lookup; without candidates, forget slowly."""
        # Candidates beyond the generated tokens are unknown, unless one before them was wrong.
        known = written if added >= min(candidates, written) else candidates
        masks = self.masks[copying]
        for depth, first in enumerate(self.initial):
            if depth >= candidates:
                masks[depth] += _RETRY * (first - masks[depth])
            elif depth < known:
                masks[depth] += weight * ((depth < added) - masks[depth])

    def _averages(self) -> Iterator[list[float]]:
        yield from (*self.masks, self.promised, self.accepted, self.lookup)


def _common(tokens: Sequence[int], written: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (token, other) in enumerate(zip(tokens, written, strict=False)):
        if token != other:
            return index
    return min(len(tokens), len(written))
