"""Planner: step costs and acceptance rates that the requests of a runtime share to plan their drafts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.acceptance import Acceptance
from spaceport.runtime.decode.budget import SHARE
from spaceport.runtime.decode.long_run import LongRun
from spaceport.runtime.decode.tree import Curve

_MOST_CURVES = 4096
_VISIBLE = 256  # visible KV slots are rounded up to multiples of this; each multiple has its own curve


class Wish(NamedTuple):
    """The value that a request gets from the rows of a call that it shares with others."""

    worth: Sequence[float]  # expected tokens of 1, 2, ... rows
    times: Sequence[float]  # its share of the call if all requests have 1, 2, ... rows, in plain steps
    rate: float  # tokens per plain step that it generates otherwise
    left: float  # remaining budget in plain steps


@dataclass
class SharedCall:
    """The requests that share an engine call; all are padded to the rows of the widest."""

    requests: int = 1
    wishes: list[Wish] = field(default_factory=list)
    width: int | None = None  # rows of the widest request, once decided

    def decide(self, least: int = 1) -> None:
        """Set the width with the highest value for all requests together that their budgets can pay for."""
        wishes = self.wishes
        if self.requests == 1 or not wishes:
            return
        shortest = min(len(wish.times) for wish in wishes)
        times = wishes[0].times
        spendable = times[0] + SHARE + sum(wish.left for wish in wishes) / self.requests
        rate = sum(wish.rate for wish in wishes)
        best, self.width = float("-inf"), least
        for rows in range(least, min(shortest, max(least, *(len(wish.worth) for wish in wishes))) + 1):
            if rows > least and times[rows - 1] > spendable:
                break
            tokens = sum(wish.worth[min(rows, len(wish.worth)) - 1] for wish in wishes)
            if tokens - rate * times[rows - 1] > best:
                best, self.width = tokens - rate * times[rows - 1], rows


class Sharing(NamedTuple):
    """What a thread shares a step with: threads of its request, other requests, visible slots."""

    threads: int = 1  # live threads of the request
    visible: int = 1  # KV slots
    call: SharedCall | None = None  # None: no other request takes part

    @property
    def requests(self) -> int:
        return 1 if self.call is None else self.call.requests

    @property
    def fills_up(self) -> bool:
        """Whether this thread's rows are padded to those of other requests."""
        return self.requests > 1 and self.threads == 1


class DraftPlanner:
    """Step costs, acceptance rates and long-run values that requests share; used by one OS thread at a time."""

    def __init__(self, costs: StepCosts, *, repeatable: bool = False) -> None:
        self.costs = costs
        self._repeatable = repeatable  # requests share nothing, so each takes the same steps every time
        self._curves: dict[tuple[int, ...], Curve] = {}
        self._version = -1  # of the costs that the curves were made of
        self._acceptance: dict[Hashable, Acceptance] = {}
        self._long_runs: dict[Hashable, LongRun] = {}

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """A thread's share of a step if all threads have 1 to `most` rows, in plain steps."""
        threads, requests = sharing.threads, sharing.requests
        blocks = -(-sharing.visible // _VISIBLE)
        if self._version != self.costs.version or len(self._curves) >= _MOST_CURVES:
            self._curves.clear()
            self._version = self.costs.version
        key = (most, threads, requests, blocks)
        curve = self._curves.get(key)
        if curve is None:
            seconds = self.costs.curve(most, threads, requests, blocks * _VISIBLE)
            curve = Curve([each / seconds[0] for each in seconds], seconds[0] * threads * requests)
            self._curves[key] = curve
        return curve

    def acceptance(self, kind: Hashable) -> Acceptance:
        """Acceptance rates that all requests of a kind have learned; each temperature is a kind, for example."""
        if self._repeatable:
            return Acceptance()
        return self._acceptance.setdefault(kind, Acceptance())

    def long_run(self, key: Hashable, mask_slots: int, lead: int = 0) -> LongRun:
        """A copy of the last shared solution, for a request to start from; unsolved if there is none."""
        known = self._long_runs.get(key)
        return LongRun(mask_slots, lead) if known is None else known.copy()

    def keep(self, key: Hashable, solution: LongRun) -> None:
        """Share a solution with later requests."""
        if not self._repeatable:
            self._long_runs[key] = solution
