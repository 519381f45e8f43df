"""Planning of drafts: the draft of each thread of a request, from what rows cost and what they are expected to yield.

A row pays if it is expected to yield more tokens than the request generates otherwise in the same time. A candidate
yields its acceptance probability. A mask slot yields a candidate of the next step: half of its acceptance rate, since
that candidate needs a row as well. docs/performance.md compares this with longer calculations, which gain nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from spaceport.graphs.contract.draft_methods import DraftAcceptance
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import VISIBLE, Curve, StepCosts
from spaceport.runtime.decode.draft import Draft, DraftConfig, Outlook, Reason, chain, tree
from spaceport.runtime.decode.plan import Part, Verdict
from spaceport.runtime.decode.sequence import TokenSequence
from spaceport.runtime.decode.sources import Acceptance, LearningProposal, sources_for

SHARE = 0.01  # of the time of plain decoding that drafts may cost
CREDIT = 1.6  # plain steps that drafts may cost at the start of a request
_MASK_VALUE = 0.5  # tokens that a right mask slot yields in the next step
_MOST_KNOWN = 4096  # curves
_NEAR = 0.25  # difference in temperature up to which measured rates of prompt lookup hold
NO_SOURCES, NO_CANDIDATES, NO_BUDGET = Draft(), Draft(limited="no_candidates"), Draft(limited="budget")
NOT_WORTH_IT = Draft(limited="not_worth_it")


class Wish(NamedTuple):
    """The value that a request gets from the rows of a call that it shares with others."""

    worth: Sequence[float]  # expected tokens of 1, 2, ... rows
    times: Sequence[float]  # its share of the call if all requests have 1, 2, ... rows, in plain steps
    rate: float  # tokens per plain step that it generates otherwise
    left: float  # plain steps that its drafts may still cost


@dataclass
class SharedCall:
    """The requests that share an engine call; all are padded to the rows of the widest."""

    requests: int
    wishes: list[Wish] = field(default_factory=list)
    least: int = 1  # rows of the widest request whose draft cannot be cut
    width: int = 1  # rows of the widest request, once decided

    def decide(self, least: int = 1) -> None:
        """Set the width with the highest value for all requests together that their budgets can pay for."""
        self.least = self.width = least
        budget, best = sum([wish.left for wish in self.wishes]), 0.0
        for rows in range(least + 1, max([len(wish.worth) for wish in self.wishes], default=0) + 1):
            value = extra = 0.0  # of the rows beyond the least: tokens less what their time yields otherwise; time
            for worth, times, rate, _ in self.wishes:
                last = len(worth) - 1
                time = times[min(rows, len(times)) - 1] - times[min(least, len(times)) - 1]
                extra += time
                value += worth[min(rows - 1, last)] - worth[min(least - 1, last)] - rate * time
            if extra > budget:
                break
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


class DraftPlanner:
    """Step costs and the acceptance rates of a bundle, from which drafts are planned."""

    def __init__(self, costs: StepCosts, measured: Sequence[DraftAcceptance] = ()) -> None:
        self.costs = costs
        self._measured = measured  # acceptance rates that the bundle brings, by temperature
        self._curve = lru_cache(_MOST_KNOWN)(costs.curve)

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """A thread's share of a step if all threads have 1 to `most` rows."""
        visible = sharing.visible // VISIBLE * VISIBLE
        return self._curve(most, sharing.threads, sharing.requests, visible)

    def acceptance(self, mask_slots: int, temperature: float = 0.0) -> Acceptance:
        """The acceptance rates with which a request starts."""
        nearest = min(self._measured, key=lambda entry: abs(entry.temperature - temperature), default=None)
        if nearest is not None and abs(nearest.temperature - temperature) > _NEAR:
            nearest = replace(nearest, lookup=())  # sampled text departs from the prompt more often
        return Acceptance(mask_slots, nearest)


@dataclass
class _Planned:
    """The inputs of a planned draft."""

    curve: Curve
    call: SharedCall | None  # that decides about its rows together with other requests
    proposals: Sequence[LearningProposal] = ()  # empty: the budget allowed no draft
    grown: bool = False  # whether a tree was grown, which takes time

    def time(self, rows: int) -> float:
        """Time of a step with this many rows of the thread, its share of the call, in plain steps."""
        times, call, least = self.curve.times, self.call, 1
        if call is not None:  # rows that no draft could avoid are not the drafts' cost
            rows, least = max(rows, call.width), call.least
        if rows == least:
            return 1.0 + self.curve.planning * self.grown
        return 1.0 + times[min(len(times), rows) - 1] - times[min(len(times), least) - 1]


class Drafter(Protocol):
    """Proposes the draft of each thread of a request, and learns from what was accepted."""

    drafts: bool  # False: all its drafts are empty, and only requests that share a call with it need to ask for them

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        """A draft for a thread that may generate `remaining` more tokens; at most `rows` rows, its last token included.

        Also called while a prompt is fed in chunks; such a draft is not used unless the chunk is the last one.
        """

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Learn which draft tokens of a step were accepted.

        `part.draft` is the draft that was fed; `part.thread` still has the candidates of the previous step, from which the
        draft was made.
        """


class ChainDrafter:
    """SPACE's draft: one chain of candidates, and the same number of mask slots behind each; heads need none."""

    drafts = True

    def __init__(self, draft_config: DraftConfig) -> None:
        self._config, self._sources = draft_config, sources_for(draft_config)
        self._depths = draft_config.mask_slots or draft_config.heads
        self._acceptance = Acceptance(draft_config.mask_slots)

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        slots, layout = self._config.mask_slots, self._config.mask_layout
        rows = min(rows, (slots + 1) * (1 + layout.rows(slots)) + self._config.heads)
        for source in self._sources:
            proposal = source(thread, self._acceptance)
            if tokens := proposal.best()[: self._depths]:
                return chain(tokens, slots, remaining, rows, layout, proposal.source)
        return chain((), slots, remaining, rows, layout)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """A chain always has the same shape."""


class TreeDrafter:
    """The draft tree of all sources that is expected to generate the most tokens per time.

    Drafts may cost a request what they have saved it, plus `SHARE` of the time of plain decoding, plus `CREDIT`. Growing a
    tree counts as well: where it takes long compared with a plain step, trees that turn out empty become rare.
    """

    def __init__(self, draft_config: DraftConfig, planner: DraftPlanner, temperature: float = 0.0) -> None:
        self._config = replace(draft_config, rows=min(draft_config.rows, STEP_ROWS))
        self._planner = planner
        self._sources = sources_for(draft_config) if draft_config.rows > 1 else []
        self._acceptance = planner.acceptance(draft_config.mask_slots, temperature)
        self.drafts = bool(self._sources)
        # Time of all tokens so far, and what plain decoding would have taken for them: in the unit of the step costs,
        # since a plain step takes longer with a longer context, and less if threads or requests share it.
        self._time = self._plain_time = 0.0
        self._planned: dict[tuple[int, ...], _Planned] = {}  # by thread

    def left(self, curve: Curve) -> float:
        """Plain steps that drafts may still cost; below 0 if drafts of other requests in its calls have cost more."""
        saved = (1 + SHARE) * self._plain_time - self._time
        return (CREDIT if self.drafts else 0.0) + SHARE + saved / curve.plain

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        curve = self._planner.curve(self._config.rows, sharing)
        # a single thread's rows are padded to those of the other requests of the call
        call = sharing.call if sharing.threads == 1 and sharing.requests > 1 else None
        planned = self._planned[thread.path] = _Planned(curve, call)
        left, rows = self.left(curve), min(rows, self._config.rows)
        rate = max(1.0, (self._plain_time + curve.plain) / (self._time + curve.plain))
        if call is not None:  # the requests of the call decide together what they can pay for
            affordable = rows if left >= curve.planning else 1
        else:
            affordable = min(rows, bisect_right(curve.times, 1 + left / sharing.threads))
        if not self.drafts:
            draft = NO_SOURCES
        elif affordable <= 1 < rows:
            draft = NO_BUDGET
        else:
            bound: Reason = "budget" if affordable < rows else "row_limit"
            draft = self._best_tree(thread, remaining, affordable, bound, rate, planned)
        if call is not None:
            call.wishes.append(Wish(draft.worth or (1.0,), curve.times, rate, left))
        return draft

    def learn(self, part: Part, verdict: Verdict) -> None:
        planned = self._planned.pop(part.thread.path, None)
        if planned is None or not verdict.tokens:
            return
        self._time += planned.time(part.draft.rows) * planned.curve.plain
        self._plain_time += len(verdict.tokens) * planned.curve.plain
        if planned.proposals:
            weight = self._acceptance.count_step()
            for proposal in planned.proposals:
                proposal.learn(verdict.tokens, weight)

    def _best_tree(
        self, thread: TokenSequence, remaining: int, rows: int, bound: Reason, rate: float, planned: _Planned
    ) -> Draft:
        """The draft with the highest expected gain."""
        config, acceptance, curve, last = self._config, self._acceptance, planned.curve, thread.tokens[-1]
        planned.proposals = [source(thread, acceptance) for source in self._sources]
        proposals, value = [], _MASK_VALUE * acceptance.masks[0] if config.mask_slots else 0.0
        for proposal in planned.proposals:
            if proposal.depths:
                proposals.append(proposal)
                if ranked := proposal.behind(0, (last,)):
                    value = max(value, ranked[0][0])
        if not proposals and not config.mask_slots:
            return NO_CANDIDATES
        if value <= rate * curve.least:
            return NOT_WORTH_IT
        planned.grown = True
        gains = [_MASK_VALUE * right for right in acceptance.masks]
        return tree(proposals, config, remaining, rows, Outlook(curve, rate, gains, last), bound)


def drafter_for(draft_config: DraftConfig, planner: DraftPlanner, temperature: float = 0.0) -> Drafter:
    """The drafter of one request."""
    if draft_config.shape == "chain" and (draft_config.mask_slots or draft_config.heads):
        return ChainDrafter(draft_config)
    return TreeDrafter(draft_config, planner, temperature)
