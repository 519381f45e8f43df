"""Drafter: the protocol of draft sources, and its implementations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple, Protocol

from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.acceptance import is_copying
from spaceport.runtime.decode.budget import DraftBudget, PlanningPause
from spaceport.runtime.decode.draft import PLAIN, Draft, DraftConfig, best_chain, chain
from spaceport.runtime.decode.long_run import LongRun, best_rate
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.planner import DraftPlanner, Sharing, Wish
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.decode.tree import Curve, Outlook, tree

_MOVED = 0.03  # change of a probability that starts another round of value iteration
_FEW_ROUNDS = 2  # for a request that starts from a solution of others
_ROUND_SECONDS = 0.005  # of decoding for each round, which takes 0.1 ms: 2 % of the time
_SHARE_EVERY = 4  # steps between updates of what requests share; it changes slowly
_PACE = 0.1  # weight of a step in the average of tokens and time


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
        found = takewhile(lambda each: each.tokens, best_chain(thread.candidates, thread.tokens[-1]))
        return chain([candidate.tokens[0] for candidate in found], slots, remaining, rows, layout, self._source)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """A chain always has the same shape."""


class PlainDrafter:
    """No drafts."""

    def __init__(self, draft_config: DraftConfig, planner: DraftPlanner) -> None:
        self._rows, self._planner = draft_config.rows, planner

    def draft(self, thread: Thread, remaining: int, rows: int, sharing: Sharing) -> Draft:
        if sharing.call is not None and sharing.fills_up:  # its rows are padded to those of requests with drafts
            sharing.call.wishes.append(Wish((1.0,), self._planner.curve(self._rows, sharing).times, 1.0, 0.0))
        return PLAIN

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Plain decoding learns nothing."""


class TreeDrafter:
    """The draft tree of mask slots or heads, and prompt lookup, that is expected to generate the most tokens per time."""

    def __init__(self, draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable) -> None:
        self._draft_config, self._planner, self._kind = draft_config, planner, kind
        self._resting = replace(draft_config, mask_slots=0)
        self._shared = planner.acceptance(kind)
        self._acceptance = self._shared.copy()
        self._budget = DraftBudget()
        self._pause = PlanningPause()
        self._least = 0.0  # minimum expected tokens of a draft row, as of the last plan
        self._tokens = self._time = 1.0  # of a step: moving averages
        self._steps = 0
        self._next_round = 0.0  # first step at which another round of value iteration may run
        self._planned: dict[tuple[int, ...], _Planned] = {}  # by thread
        self._copied: dict[tuple[int, ...], int] = {}  # by thread: correct lookup tokens in a row
        # By threads, requests and whether text is copied: the solution, and the inputs of its last round.
        self._long_runs: dict[tuple[int, int, bool], tuple[LongRun, list[float], Curve]] = {}

    def draft(self, thread: Thread, remaining: int, rows: int, sharing: Sharing) -> Draft:
        curve = self._planner.curve(self._draft_config.rows, sharing)
        lookup_tokens: Sequence[int] = ()
        equal, copied = 0, 0
        if thread.lookup is not None:
            lookup_tokens, equal = thread.lookup.following(thread.tokens, self._draft_config.lookup)
            copied = self._copied.get(thread.path, 0)
        paused = self._pauses(lookup_tokens, equal, sharing)
        planned = _Planned(curve, sharing, lookup_tokens, equal, copied, paused)
        self._planned[thread.path] = planned
        if sharing.requests == sharing.threads == 1 and self._planner.costs.take_plain_step():
            return PLAIN
        draft_config = self._draft_config if self._budget.allows_masks else self._resting
        if paused or not (thread.candidates or lookup_tokens or draft_config.mask_slots):
            self._wish(curve, sharing, PLAIN, self._tokens / self._time)
            return PLAIN
        return self._plan(thread, draft_config, remaining, rows, planned)

    def _plan(self, thread: Thread, draft_config: DraftConfig, remaining: int, rows: int, planned: _Planned) -> Draft:
        """The draft with the highest expected gain."""
        curve, sharing, lookup_tokens, equal, copied, _ = planned
        acceptance = self._acceptance
        long_run = self._long_run(curve, sharing, is_copying(copied))
        outlook = Outlook(
            curve,
            max(long_run.rate, self._heads_rate(curve, is_copying(copied)), self._tokens / self._time),
            long_run.gains,
            [acceptance.trust(depth) for depth in range(len(thread.candidates))],
            acceptance.lookup_probabilities(equal, copied, len(lookup_tokens)),
            thread.tokens[-1],
        )
        affordable = draft_config.rows if sharing.fills_up else self._budget.rows(curve.times)
        draft = tree(thread.candidates, lookup_tokens, draft_config, remaining, min(rows, affordable), outlook)
        self._wish(curve, sharing, draft, outlook.rate)
        self._least = outlook.rate * (curve.times[min(1, len(curve.times) - 1)] - 1)
        self._pause.planned(draft.rows, curve.plain / sharing.requests)
        return draft

    def learn(self, part: Part, verdict: Verdict) -> None:
        thread, draft, written = part.thread, part.draft, verdict.tokens
        planned = self._planned.pop(thread.path, None)
        if planned is None or not written:
            return
        time = planned.time(draft.rows)
        self._budget.spend(time, len(written))
        self._tokens += _PACE * (len(written) - self._tokens)
        self._time += _PACE * (time - self._time)
        if planned.paused:
            self._copied.pop(thread.path, None)
            return
        right, copied, steps = 0, planned.copied, 1 + self._pause.take_skipped()
        self._steps += 1
        candidates = best_chain(thread.candidates, thread.tokens[-1])
        learning = (self._acceptance, self._shared) if self._steps % _SHARE_EVERY == 0 else (self._acceptance,)
        for acceptance in learning:
            if thread.lookup is not None:
                right = acceptance.learn_lookup(planned.lookup_tokens, written, planned.equal, copied)
            acceptance.learn_masks(candidates, written, right, is_copying(copied), steps)
        if thread.lookup is not None:
            whole = right == min(len(planned.lookup_tokens), len(written))
            self._copied[thread.path] = copied + right if whole and right else 0

    def _pauses(self, lookup_tokens: Sequence[int], equal: int, sharing: Sharing) -> bool:
        """Whether to skip planning: the last plans were empty, and prompt lookup has no probable token."""
        if not self._pause.remaining or sharing.threads > 1:
            return False
        if lookup_tokens:
            (probability,) = self._acceptance.lookup_probabilities(equal, 0, 1)
            if probability > self._least * (
                1 - probability
            ):  # value of a long chain whose tokens are all as probable as the first
                return False
        self._pause.skip()
        return True

    def _heads_rate(self, curve: Curve, copying: bool) -> float:
        """Tokens per plain step with the best number of candidates from heads, which every step leaves."""
        return best_rate(curve.times, self._acceptance.reach(self._draft_config.heads, copying))

    def _wish(self, curve: Curve, sharing: Sharing, draft: Draft, rate: float) -> None:
        if sharing.call is not None and sharing.fills_up:
            sharing.call.wishes.append(Wish(draft.worth or (1.0,), curve.times, rate, self._budget.left))

    def _long_run(self, curve: Curve, sharing: Sharing, copying: bool) -> LongRun:
        """The long-run values for threads that share a step in this way, improved from time to time."""
        mask_slots = self._draft_config.mask_slots
        key = (sharing.threads, sharing.requests, copying)
        shared_key = (self._kind, mask_slots, *key)
        lead = self._draft_config.mask_layout.lead
        reach = self._acceptance.reach(mask_slots, copying)
        found, before, planned = self._long_runs.get(key, (None, reach, curve))
        if found is None:
            found = self._planner.long_run(shared_key, mask_slots, lead)
            found.solve(curve.times, reach, *((_FEW_ROUNDS,) if found.rate else ()))
            self._planner.keep(shared_key, found)
        elif self._steps < self._next_round or (
            found.settled
            and planned is curve
            and all(abs(now - then) < _MOVED for now, then in zip(reach, before, strict=True))
        ):
            return found
        else:
            found.improve(curve.times, reach)
        self._next_round = self._steps + _ROUND_SECONDS / curve.plain
        self._long_runs[key] = found, reach, curve
        return found


class _Planned(NamedTuple):
    """The inputs of a planned draft."""

    curve: Curve
    sharing: Sharing
    lookup_tokens: Sequence[int]
    equal: int  # number of matching tokens before the lookup tokens
    copied: int  # correct lookup tokens in a row before this step
    paused: bool = False  # planning was skipped

    def time(self, rows: int) -> float:
        """Time of a step with this many rows of the thread, its share of the call, in plain steps."""
        call = self.sharing.call
        if self.sharing.fills_up and call is not None:
            rows = max(rows, call.width or 1)
        return self.curve.times[min(len(self.curve.times), rows) - 1]


def drafter_for(draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable = None) -> Drafter:
    """The drafter of one request; requests of one kind share what they learn."""
    if not (draft_config.mask_slots or draft_config.heads or draft_config.lookup):
        return PlainDrafter(draft_config, planner)
    return ChainDrafter(draft_config) if draft_config.shape == "chain" else TreeDrafter(draft_config, planner, kind)
