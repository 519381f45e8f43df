"""Acceptance: learned probabilities that draft tokens are accepted, by source and depth.

Every generated token shows whether each source had predicted it, also if it was not drafted. Only mask slots have to be
fed to be measured. The heads of a bundle are measured as mask slots are, which it does not have then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile

from spaceport.runtime.decode.draft import Candidates

_FIRST, _LATER = 0.7, 0.85  # initial probabilities of mask slots: of the first, and of each behind an accepted one
_NEW = 0.1  # minimum weight of a step in an average
_HOPE = 0.5  # how far mask slots start back towards their initial probabilities in a new request
_PRIOR = 3  # steps that the initial values count for
_RETRY = 0.01  # share per step by which unused mask slots return to their initial probability, to be tried again
_LEAST_RETRY = 0.0005
_LEAST_TRUST, _MOST_TRUST = 0.1, 1.5
_COPIED = (4, 16)  # accepted tokens of prompt lookup in a row: few, many
# Initial probabilities of prompt lookup: after 2, 3 or 4 matching tokens, and after few or many accepted ones in a row.
_LOOKUP = (0.3, 0.45, 0.6, 0.85, 0.95)
_MASKS_SEEN, _TRUST_SEEN, _LOOKUP_SEEN = 0, 2, 3  # indices into `seen`


@dataclass
class Acceptance:
    """Acceptance probabilities; each is a moving average over the steps of one request, or of all that share it."""

    # By depth: how often mask slots added that many tokens to those of prompt lookup; second list: while text is copied.
    masks: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    promised: list[float] = field(
        default_factory=list
    )  # by depth: probability that mask slots gave to their best token
    accepted: list[float] = field(
        default_factory=list
    )  # by depth: how often that token was accepted, behind an accepted one
    lookup: list[float] = field(default_factory=lambda: list(_LOOKUP))  # by kind of match
    retry: float = _RETRY
    seen: list[int] = field(default_factory=lambda: [0] * (_LOOKUP_SEEN + len(_LOOKUP)))  # steps, by average

    def copy(self) -> Acceptance:
        """A copy that a new request starts with.

        Mask slots start half way back to their initial probabilities: how well they predict differs between texts, and a
        trial costs little. Another thread may change the original meanwhile.
        """
        accepted = list(self.accepted)
        first, copying = ([rate + _HOPE * max(0.0, _first(i) - rate) for i, rate in enumerate(m)] for m in self.masks)
        return replace(
            self,
            masks=(first, copying),
            promised=self.promised[: len(accepted)],  # which grows first
            accepted=accepted,
            lookup=list(self.lookup),
            seen=[0] * len(self.seen),
        )

    def reach(self, mask_slots: int, copying: bool) -> list[float]:
        """The probability that mask slots or heads add one token, two tokens, ... to those of prompt lookup."""
        masks = self.masks[copying]
        while len(masks) < mask_slots:
            masks.append(_first(len(masks)))
        return list(accumulate(masks[:mask_slots], min))

    def trust(self, depth: int) -> float:
        """Factor that corrects the probabilities that mask slots give at a depth."""
        if depth >= len(self.accepted):
            return self.trust(depth - 1) if depth else 1.0
        return min(_MOST_TRUST, max(_LEAST_TRUST, self.accepted[depth] / self.promised[depth]))

    def lookup_probabilities(self, equal: int, copied: int, count: int) -> list[float]:
        """Acceptance probability of each lookup token behind accepted ones; see `learn_lookup` for `equal` and `copied`."""
        return [self.lookup[_kind(equal + depth, copied + depth)] for depth in range(count)]

    def learn_lookup(self, lookup_tokens: Sequence[int], written: Sequence[int], equal: int, copied: int) -> int:
        """Learn from the tokens that a step generated; returns the number of correct lookup tokens.

        `equal` is the number of matching tokens before them, `copied` how many of these were correct lookup tokens.
        """
        right = _common(lookup_tokens, written)
        for depth in range(min(right + 1, len(lookup_tokens), len(written))):
            kind = _kind(equal + depth, copied + depth)
            self.lookup[kind] += self._weight(_LOOKUP_SEEN + kind) * ((depth < right) - self.lookup[kind])
        return right

    def learn_masks(
        self,
        candidates: Sequence[Candidates],
        written: Sequence[int],
        lookup_tokens: int,
        copying: bool,
        steps: int = 1,
    ) -> None:
        """Learn from the tokens that a step generated; `lookup_tokens` is how many of them prompt lookup predicted too.

        `steps` counts the step and those before it from which nothing was learned.
        """
        best = [candidate.tokens[0] for candidate in takewhile(lambda candidate: candidate.tokens, candidates)]
        right = _common(best, written)
        self._learn_reach(right - lookup_tokens, len(candidates), min(len(candidates), len(written)), copying, steps)
        if best:
            weight = self._weight(_TRUST_SEEN)
            for depth in range(min(right + 1, len(best), len(written))):
                if depth == len(self.accepted):
                    self.promised.append(_FIRST)
                    self.accepted.append(_FIRST * self.trust(depth))
                self.promised[depth] += weight * (candidates[depth].probabilities[0] - self.promised[depth])
                self.accepted[depth] += weight * ((depth < right) - self.accepted[depth])

    def _learn_reach(self, added: int, candidates: int, known: int, copying: bool, steps: int) -> None:
        """The fate of the first `known` of the `guesses` is known; the others were wrong unless all of these were right."""
        masks = self.masks[copying]
        known = known if added >= known else candidates
        weight = self._weight(_MASKS_SEEN + copying) if known else 0.0
        for depth in range(max(known, len(masks))):
            if depth == len(masks):
                masks.append(_first(depth))
            if depth < known:
                masks[depth] += weight * ((depth < added) - masks[depth])
            elif depth >= candidates:
                masks[depth] += min(1.0, self.retry * steps) * (_first(depth) - masks[depth])
        if known:
            self.retry = _RETRY if added > 0 else max(_LEAST_RETRY, self.retry * 0.9)

    def _weight(self, average: int) -> float:
        """The weight of the next step in an average: the first steps count more."""
        self.seen[average] += 1
        return max(_NEW, 1 / (self.seen[average] + _PRIOR))


def is_copying(copied: int) -> bool:
    """Whether text is being copied, by the number of correct lookup tokens in a row."""
    return copied >= _COPIED[0]


def _first(depth: int) -> float:
    return _FIRST * _LATER**depth


def _kind(equal: int, copied: int) -> int:
    if copied >= _COPIED[0]:
        return 3 + (copied >= _COPIED[1])
    return max(0, min(equal - 2, 2))


def _common(tokens: Sequence[int], written: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (token, other) in enumerate(zip(tokens, written, strict=False)):
        if token != other:
            return index
    return min(len(tokens), len(written))
