"""Budget: what a request may still spend on drafts and on planning them, as a small share of its time."""

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


PLANNING_SECONDS = 1e-4  # of Python code that plans a draft, on the machine of docs/performance.md
_LONGEST_PAUSE = 16  # steps


class PlanningPause:
    """Steps that a request takes without planning a draft, while the plans of earlier steps were all empty.

    A pause doubles with each empty plan, until planning takes no more than `SHARE` of the time. It is short where steps are
    long: planning costs a large model nothing that matters.
    """

    def __init__(self) -> None:
        self.remaining = 0  # steps
        self.skipped = 0  # steps since the last plan
        self._length = 0

    def skip(self) -> None:
        """Note a step without a plan."""
        self.remaining -= 1
        self.skipped += 1

    def planned(self, rows: int, plain_seconds: float) -> None:
        """Note a plan with this many rows; a plain step of this request takes `plain_seconds`."""
        longest = min(_LONGEST_PAUSE, int(PLANNING_SECONDS / (SHARE * plain_seconds)))
        self._length = min(longest, max(1, 2 * self._length)) if rows == 1 else 0
        self.remaining, self.skipped = self._length, 0
