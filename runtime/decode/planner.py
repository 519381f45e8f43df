"""Planner: what the requests of a runtime share to plan their drafts: step costs, and what was accepted so far."""

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
_VISIBLE = 256  # visible KV slots are rounded up to multiples of this: each multiple has curves of its own


class Wish(NamedTuple):
    """What a request would do with the rows of a call that it shares with others."""

    worth: Sequence[float]  # tokens that 1, 2, ... rows are worth
    times: Sequence[float]  # its share of the call, if all have 1, 2, ... rows, in plain steps
    rate: float  # tokens that it writes otherwise in the time of a plain step
    left: float  # plain steps of its budget


@dataclass
class SharedCall:
    """The requests that share an engine call, in which all are filled up to the rows of the widest."""

    requests: int = 1
    wishes: list[Wish] = field(default_factory=list)
    width: int | None = None  # rows of the widest request, once that is decided

    def decide(self, least: int = 1) -> None:
        """Take the width that is worth the most for its time to all together, if their budgets can pay for it."""
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
    """Who takes part in a step, beside a thread that plans its draft."""

    threads: int = 1  # of the request, the one that plans included
    visible: int = 1  # KV slots
    call: SharedCall | None = None  # none: no other request takes part

    @property
    def requests(self) -> int:
        return 1 if self.call is None else self.call.requests

    @property
    def fills_up(self) -> bool:
        """Whether the rows of other requests decide about the rows of this thread."""
        return self.requests > 1 and self.threads == 1


class DraftPlanner:
    """Costs, acceptance and long-run worth, shared between requests; used by one thread at a time."""

    def __init__(self, costs: StepCosts, *, repeatable: bool = False) -> None:
        self.costs = costs
        self._repeatable = repeatable  # requests learn nothing from each other: each takes the same steps every time
        self._curves: dict[tuple[int, ...], Curve] = {}
        self._version = -1  # of the costs that the curves were made of
        self._acceptance: dict[Hashable, Acceptance] = {}
        self._long_runs: dict[Hashable, LongRun] = {}

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """The share of a step by the rows of each thread, up to `most`, in plain steps, if all threads have as many."""
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
        """What all requests of a kind have learned so far: temperatures, for example, are kinds."""
        if self._repeatable:
            return Acceptance()
        return self._acceptance.setdefault(kind, Acceptance())

    def long_run(self, key: Hashable, mask_slots: int) -> LongRun:
        """The last solution under a key, for a request to go on from; unsolved if there is none."""
        known = self._long_runs.get(key)
        return LongRun(mask_slots) if known is None else known.copy()

    def keep(self, key: Hashable, solution: LongRun) -> None:
        """Share a solution."""
        if not self._repeatable:
            self._long_runs[key] = solution
