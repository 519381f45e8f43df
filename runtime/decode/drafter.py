"""Draft sources: what proposes the draft of each thread of a request, and learns from what was accepted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Protocol

from spaceport.graphs.contract.draft_acceptance import is_copying
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import Curve
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.acceptance import Acceptance
from spaceport.runtime.decode.draft import PLAIN, Draft, DraftConfig, best_chain, chain
from spaceport.runtime.decode.long_run import best_rate
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.planner import CREDIT, SHARE, DraftPlanner, Sharing, Wish
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.decode.tree import Outlook, tree

_PACE = 0.1  # weight of a step in the average of tokens and time
_PUBLISH_EVERY, _PUBLISHED = 8, 0.2  # steps between updates of the rates that requests share, and their weight
NO_CANDIDATES, NO_BUDGET = Draft(limited="no_candidates"), Draft(limited="budget")
NOT_WORTH_IT = Draft(limited="not_worth_it")


class Drafter(Protocol):
    """Proposes the draft of each thread of a request, and learns from what was accepted."""

    def draft(self, thread: Thread, remaining: int, rows: int, sharing: Sharing) -> Draft:
        """A draft for a thread that may generate `remaining` more tokens; at most `rows` rows, its last token included.

        Also called while a prompt is fed in chunks; such a draft is not used unless the chunk is the last one.
        """

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Learn which draft tokens of a step were accepted.

        `part.draft` is the draft that was fed, an empty one for a chunk of a prompt; `part.thread` still has the
        candidates of the previous step, from which the draft was made.
        """


class ChainDrafter:
    """SPACE's draft: one chain of candidates, and the same number of mask slots behind each; heads need none."""

    def __init__(self, draft_config: DraftConfig) -> None:
        self._mask_slots, self._mask_layout = draft_config.mask_slots, draft_config.mask_layout
        self._source, self._heads = draft_config.predictor, draft_config.heads

    def draft(self, thread: Thread, remaining: int, rows: int, sharing: Sharing) -> Draft:
        slots, layout = self._mask_slots, self._mask_layout
        rows = min(rows, (slots + 1) * (1 + layout.rows(slots)) + self._heads)
        # A mask slot or head without a probable token ends the chain.
        probable = takewhile(lambda each: each.tokens, best_chain(thread.candidates, thread.tokens[-1]))
        return chain([candidate.tokens[0] for candidate in probable], slots, remaining, rows, layout, self._source)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """A chain always has the same shape."""


class TreeDrafter:
    """The draft tree of mask slots or heads, and prompt lookup, that is expected to generate the most tokens per time.

    Drafts may cost a request what they have saved it, plus `SHARE` of the time of plain decoding, plus `CREDIT`. Growing a
    tree counts as well: where it takes long compared with a plain step, trees that turn out empty become rare.
    """

    def __init__(
        self, draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable = None, temperature: float = 0.0
    ) -> None:
        self._config = replace(draft_config, rows=min(draft_config.rows, STEP_ROWS))
        self._planner, self._kind, self._temperature = planner, kind, temperature
        self._depths = draft_config.mask_slots or draft_config.heads
        self._drafts = draft_config.rows > 1 and bool(self._depths or draft_config.lookup)
        # plain steps that drafts may still cost; below 0 if drafts of other requests in its calls have cost more
        self.left = CREDIT if self._drafts else 0.0
        self._plain = 0.0  # time of a plain step in which `left` is counted; 0: unknown
        self._tokens = self._time = 1.0  # of a step: moving averages
        self._planned: dict[tuple[int, ...], _Planned] = {}  # by thread
        self._copied: dict[tuple[int, ...], int] = {}  # by thread: correct lookup tokens in a row

    @cached_property
    def _shared(self) -> Acceptance:
        return self._planner.acceptance(self._kind, self._depths, self._temperature)

    @cached_property
    def _acceptance(self) -> Acceptance:
        """Made with the first draft, by the OS thread that runs steps: requests of the same history start alike."""
        return self._shared.copy()

    def draft(self, thread: Thread, remaining: int, rows: int, sharing: Sharing) -> Draft:
        curve = self._planner.curve(self._config.rows, sharing)
        if curve.plain != self._plain:  # other threads or requests share its steps, or it has a longer context
            self.left *= (self._plain or curve.plain) / curve.plain
            self._plain = curve.plain
        planned = self._planned[thread.path] = _Planned(curve, sharing, max(1.0, self._tokens / self._time))
        if sharing.fills_up:  # the requests of the call decide together what they can pay for
            affordable = self._config.rows if self.left + SHARE >= curve.planning else 1
        else:
            # Threads share what is left. Mask slots cost a second time when their tokens are verified, so without
            # candidates half of it is reserved.
            left = self.left / sharing.threads / (1 if thread.candidates else 2)
            affordable = bisect_right(curve.times, 1 + SHARE + left)
        if affordable > 1 and self._drafts:
            draft = self._planned_draft(thread, remaining, min(rows, affordable), planned)
            if draft.limited == "row_limit" and affordable < rows:
                draft = replace(draft, limited="budget")
        else:
            draft = NO_BUDGET if self._drafts else PLAIN
        if sharing.call is not None and sharing.fills_up:
            sharing.call.wishes.append(Wish(draft.worth or (1.0,), curve.times, planned.rate, self.left))
        return draft

    def learn(self, part: Part, verdict: Verdict) -> None:
        thread, written = part.thread, verdict.tokens
        planned = self._planned.pop(thread.path, None)
        if planned is None or not written:
            return
        time = planned.time(part.draft.rows)
        self.left += len(written) * (1 + SHARE) - time
        self._tokens += _PACE * (len(written) - self._tokens)
        self._time += _PACE * (time - self._time)
        if not planned.looked_up:  # nothing is known about what would have been drafted
            self._copied.pop(thread.path, None)
            return
        candidates = best_chain(thread.candidates, thread.tokens[-1])
        right = self._acceptance.learn(planned.lookup_tokens, planned.equal, planned.copied, candidates, written)
        if self._acceptance.steps % _PUBLISH_EVERY == 0:
            self._shared.follow(self._acceptance, _PUBLISHED)
        whole = right == min(len(planned.lookup_tokens), len(written))
        self._copied[thread.path] = planned.copied + right if whole and right else 0

    def _planned_draft(self, thread: Thread, remaining: int, rows: int, planned: _Planned) -> Draft:
        """The draft with the highest expected gain."""
        config, acceptance, curve = self._config, self._acceptance, planned.curve
        planned.looked_up = True
        if thread.lookup is not None:
            planned.lookup_tokens, planned.equal = thread.lookup.following(thread.tokens, config.lookup)
            planned.copied = self._copied.get(thread.path, 0)
        if not (thread.candidates or planned.lookup_tokens or config.mask_slots):
            return NO_CANDIDATES
        reach = acceptance.reach(is_copying(planned.copied))
        solution = self._planner.long_run(curve, reach, config)
        planned.rate = max(solution.rate, best_rate(curve, reach) if config.heads else 0.0, planned.rate)
        trust = [acceptance.trust(depth) for depth in range(len(thread.candidates))]
        lookup = acceptance.lookup_probabilities(planned.equal, planned.copied, len(planned.lookup_tokens))
        first = [one for one in best_chain(thread.candidates[:1], thread.tokens[-1]) if one.tokens]
        values = (*(one.probabilities[0] * trust[0] for one in first), *lookup[:1], *solution.gains[:1])
        if max(values, default=0.0) <= planned.rate * curve.least:
            return NOT_WORTH_IT
        outlook = Outlook(curve, planned.rate, solution.gains, trust, lookup, thread.tokens[-1])
        planned.grown = True
        return tree(thread.candidates, planned.lookup_tokens, config, remaining, min(rows, config.rows), outlook)


@dataclass
class _Planned:
    """The inputs of a planned draft."""

    curve: Curve
    sharing: Sharing
    rate: float  # tokens per plain step that are generated otherwise
    looked_up: bool = False  # False: the budget allowed no draft
    lookup_tokens: Sequence[int] = ()
    equal: int = 0  # number of matching tokens before the lookup tokens
    copied: int = 0  # correct lookup tokens in a row before this step
    grown: bool = False  # whether a tree was grown, which takes time

    def time(self, rows: int) -> float:
        """Time of a step with this many rows of the thread, its share of the call, in plain steps."""
        times, call, least = self.curve.times, self.sharing.call, 1
        if self.sharing.fills_up and call is not None:  # rows that no draft could avoid are not the drafts' cost
            rows, least = max(rows, call.width or 1), call.least
        if rows == least:
            return 1.0 + self.curve.planning * self.grown
        return 1.0 + times[min(len(times), rows) - 1] - times[min(len(times), least) - 1]


def drafter_for(
    draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable = None, temperature: float = 0.0
) -> Drafter:
    """The drafter of one request; requests of one kind share what they learn."""
    if draft_config.shape == "chain" and (draft_config.mask_slots or draft_config.heads):
        return ChainDrafter(draft_config)
    return TreeDrafter(draft_config, planner, kind, temperature)
