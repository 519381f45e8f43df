"""Budget: what a request may still spend on drafts, so that these never cost it more than a small share of its time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

SHARE = 0.01  # of the time of plain decoding, that drafts may lose
CREDIT = 2.5  # plain steps that they may lose at the beginning
_REST, _TRY = 0.3, 0.6  # plain steps: with less, mask slots rest; with more, they are tried again


class DraftBudget:
    """The time that drafts have saved a request, plus what they may lose, in plain steps; it never falls below 0."""

    def __init__(self) -> None:
        self.left = CREDIT
        self._resting = False

    def rows(self, times: Sequence[float]) -> int:
        """The most rows of a step that can be paid for if nothing is accepted; `times` are of 1, 2, ... rows."""
        return max(1, bisect_right(times, times[0] + self.left + SHARE))

    @property
    def allows_masks(self) -> bool:
        """Whether mask slots may be fed: what is left when they have lost is kept for tokens that are at hand."""
        self._resting = self.left < (_TRY if self._resting else _REST)
        return not self._resting

    def spend(self, time: float, tokens: int) -> None:
        """Note a step that took this time and wrote this many tokens."""
        self.left = max(0.0, self.left + tokens * (1 + SHARE) - time)
