"""What the requests of a runtime share to plan their drafts: step costs, acceptance rates, and the width of a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance
from spaceport.runtime.costs import VISIBLE, Curve, StepCosts
from spaceport.runtime.decode.acceptance import Acceptance
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.long_run import LongRun, solve

SHARE = 0.01  # of the time of plain decoding that drafts may cost
CREDIT = 1.6  # plain steps that drafts may cost at the start of a request
_GRID = 10  # acceptance rates are rounded to 1 / 10 for value iteration
_MOST_KNOWN = 4096  # curves or solutions
_NEAR = 0.25  # difference in temperature up to which measured rates of prompt lookup hold


class Wish(NamedTuple):
    """The value that a request gets from the rows of a call that it shares with others."""

    worth: Sequence[float]  # expected tokens of 1, 2, ... rows
    times: Sequence[float]  # its share of the call if all requests have 1, 2, ... rows, in plain steps
    rate: float  # tokens per plain step that it generates otherwise
    left: float  # remaining budget in plain steps

    def extra(self, least: int, rows: int) -> float:
        """The time that more rows than a number cost the request."""
        return self.times[min(rows, len(self.times)) - 1] - self.times[min(least, len(self.times)) - 1]

    def value(self, rows: int) -> float:
        """Expected tokens of this many rows, less what their time yields otherwise."""
        return self.worth[min(rows, len(self.worth)) - 1] - self.rate * self.times[min(rows, len(self.times)) - 1]


@dataclass
class SharedCall:
    """The requests that share an engine call; all are padded to the rows of the widest."""

    requests: int
    wishes: list[Wish] = field(default_factory=list)
    least: int = 1  # rows of the widest request whose draft cannot be cut
    width: int | None = None  # rows of the widest request, once decided

    def decide(self, least: int = 1) -> None:
        """Set the width with the highest value for all requests together that their budgets can pay for."""
        self.least = self.width = least
        if not self.wishes:
            return
        best, budget = float("-inf"), sum(wish.left + SHARE for wish in self.wishes)
        for rows in range(least, max(len(wish.worth) for wish in self.wishes) + 1):
            if sum(wish.extra(least, rows) for wish in self.wishes) > max(0.0, budget):
                break
            value = sum(wish.value(rows) for wish in self.wishes)
            if value > best:
                best, self.width = value, rows


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

    def __init__(self, costs: StepCosts, measured: Sequence[DraftAcceptance] = (), *, repeatable: bool = False) -> None:
        self.costs = costs
        self._measured = measured  # acceptance rates that the bundle brings, by temperature
        self._repeatable = repeatable  # requests share nothing, so each takes the same steps every time
        self._acceptance: dict[Hashable, Acceptance] = {}
        self._curves: dict[tuple[int, int, int, int], Curve] = {}
        self._solutions: dict[Hashable, LongRun] = {}
        self._last: dict[Hashable, LongRun] = {}  # solutions from which similar ones are found

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """A thread's share of a step if all threads have 1 to `most` rows."""
        key = (most, sharing.threads, sharing.requests, sharing.visible // VISIBLE)
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) == _MOST_KNOWN:
                for known in (self._curves, self._solutions, self._last):
                    known.clear()
            curve = self._curves[key] = self.costs.curve(most, sharing.threads, sharing.requests, sharing.visible)
        return curve

    def acceptance(self, kind: Hashable, depths: int, temperature: float = 0.0) -> Acceptance:
        """Acceptance rates that all requests of a kind have learned."""
        nearest = min(self._measured, key=lambda one: abs(one.temperature - temperature), default=None)
        if nearest is not None and abs(nearest.temperature - temperature) > _NEAR:
            nearest = replace(nearest, lookup=())  # sampled text departs from the prompt more often
        if self._repeatable:
            return Acceptance(depths, nearest)
        return self._acceptance.setdefault((kind, depths), Acceptance(depths, nearest))

    def long_run(self, curve: Curve, reach: Sequence[float], draft_config: DraftConfig) -> LongRun:
        """The long-run values for acceptance probabilities, which are rounded so that few have to be solved."""
        coarse = tuple([round(_GRID * rate) for rate in reach[: draft_config.mask_slots]])
        shape = (curve, draft_config.mask_slots, draft_config.mask_layout)
        key = (*shape, coarse)
        solution = self._solutions.get(key)
        if solution is None:
            if len(self._solutions) == _MOST_KNOWN:
                self._solutions.clear()
            start = None if self._repeatable else self._last.get(shape)
            near = [rate / _GRID for rate in coarse]
            solution = solve(curve, near, replace(draft_config, siblings=1), start)
            self._solutions[key] = self._last[shape] = solution
        return solution
