"""Planner: what the requests of a runtime share to plan their drafts: step costs, and what was accepted so far."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.acceptance import SHARED, Acceptance
from spaceport.runtime.decode.long_run import LongRun
from spaceport.runtime.decode.tree import Curve

_VISIBLE = 256  # curves are made for every so many visible KV slots


class Sharing(NamedTuple):
    """Who takes part in a step, beside a thread that plans its draft."""

    threads: int = 1  # of the request, the one that plans included
    requests: int = 1
    visible: int = 1  # KV slots


class DraftPlanner:
    """Costs, acceptance and long-run worth, shared between requests; used by one thread at a time."""

    def __init__(self, costs: StepCosts, *, repeatable: bool = False) -> None:
        self.costs = costs
        self._repeatable = repeatable  # requests learn nothing from each other: each takes the same steps every time
        self._curves: dict[tuple[int, Sharing], tuple[int, Curve]] = {}
        self._acceptance: dict[Hashable, Acceptance] = {}
        self._long_runs: dict[Hashable, LongRun] = {}

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """What the rows of each thread cost, up to `most`, in plain steps."""
        blocks = -(-sharing.visible // _VISIBLE)
        key = (most, sharing._replace(visible=blocks))
        version, curve = self._curves.get(key, (-1, None))
        if curve is None or version != self.costs.version:
            seconds = self.costs.curve(most, sharing.threads, sharing.requests, blocks * _VISIBLE)
            curve = Curve([each / seconds[0] for each in seconds], seconds[0] * sharing.threads * sharing.requests)
            self._curves[key] = self.costs.version, curve
        return curve

    def acceptance(self, kind: Hashable) -> Acceptance:
        """What all requests of a kind have learned so far: temperatures, for example, are kinds."""
        if self._repeatable:
            return Acceptance()
        return self._acceptance.setdefault(kind, Acceptance(weight=SHARED))

    def long_run(self, key: Hashable, mask_slots: int) -> LongRun:
        """The last solution under a key, for a request to go on from; unsolved if there is none."""
        known = self._long_runs.get(key)
        return LongRun(mask_slots) if known is None else known.copy()

    def keep(self, key: Hashable, solution: LongRun) -> None:
        """Share a solution."""
        if not self._repeatable:
            self._long_runs[key] = solution
