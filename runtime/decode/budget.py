"""Budget: the time that a request may lose to drafts and to planning them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

SHARE = 0.01  # of the time of plain decoding that drafts may cost
CREDIT = 2.5  # plain steps that drafts may cost at the start of a request
_REST, _TRY = 0.3, 0.6  # plain steps: mask slots pause below the first, and are tried again above the second


class DraftBudget:
    """The time that drafts have saved a request plus their allowance, in plain steps; never below 0."""

    def __init__(self) -> None:
        self.left = CREDIT
        self._resting = False

    def rows(self, times: Sequence[float]) -> int:
        """Maximum rows that the budget can pay for if nothing is accepted; `times` are those of 1, 2, ... rows."""
        return max(1, bisect_right(times, times[0] + self.left + SHARE))

    @property
    def allows_masks(self) -> bool:
        """Whether mask slots may be fed; below a limit, the budget is reserved for draft tokens that already exist."""
        self._resting = self.left < (_TRY if self._resting else _REST)
        return not self._resting

    def spend(self, time: float, tokens: int) -> None:
        """Account for a step that took this time, in plain steps, and generated this many tokens."""
        self.left = max(0.0, self.left + tokens * (1 + SHARE) - time)


PLANNING_SECONDS = 1e-4  # of Python code that plans a draft, on the machine of docs/performance.md
_LONGEST_PAUSE = 16  # steps


class PlanningPause:
    """Number of steps that a request takes without planning a draft, after plans that were all empty.

    A pause doubles with each empty plan, until planning takes no more than `SHARE` of the time. It is short where steps are
    long: for a large model planning takes a negligible share.
    """

    def __init__(self) -> None:
        self.remaining = 0  # steps
        self._skipped = 0  # steps without a plan that nothing was learned from
        self._length = 0

    def skip(self) -> None:
        """Count a step without a plan."""
        self.remaining -= 1
        self._skipped += 1

    def take_skipped(self) -> int:
        """The number of steps without a plan since this was last asked."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def planned(self, rows: int, plain_seconds: float) -> None:
        """Set the next pause after a plan with this many rows; a plain step takes `plain_seconds`."""
        longest = min(_LONGEST_PAUSE, int(PLANNING_SECONDS / (SHARE * plain_seconds)))
        self._length = min(longest, max(1, 2 * self._length)) if rows == 1 else 0
        self.remaining = self._length
