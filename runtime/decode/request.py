"""Request: one generation under way: its threads, the KV slots that they hold, and what its steps cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS, Lowering
from spaceport.runtime.costs import fixed_costs
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.draft import Draft, DraftConfig
from spaceport.runtime.decode.drafter import Drafter, drafter_for
from spaceport.runtime.decode.events import Listener, NullListener
from spaceport.runtime.decode.plan import Part, Plan, plan_thread
from spaceport.runtime.decode.planner import DraftPlanner, SharedCall, Sharing
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import Ending, Thread, new_thread
from spaceport.runtime.engine import CPU_COSTS, NO_MOVES, Moves


@dataclass(frozen=True)
class RequestConfig:
    """What a request may write and how it drafts; fixed when it is admitted."""

    tokens: TokenIds
    selector: TokenSelector
    max_length: int  # tokens of a thread, the prompt and everything before its forks included
    max_total: int  # new tokens of all threads together; 0: the request ends when its prompt is in the KV cache
    draft_config: DraftConfig = field(default_factory=DraftConfig)
    planner: DraftPlanner = field(default_factory=lambda: DraftPlanner(fixed_costs(CPU_COSTS.row)))
    kind: Hashable = None  # requests of one kind share what they learn about acceptance
    max_rows: int | None = None  # rows of a step that the engine takes; None: any number
    max_threads: int = 1  # threads that write at the same time; the others are queued
    echo: int | None = None  # index of the first prompt token whose logits observers see too
    end: frozenset[int] = frozenset()


class ScheduledStep(NamedTuple):
    """What one request takes to a step: its rows, and the KV slots that they are written to."""

    request: Request
    engine_index: int  # of the request in the engine
    plan: Plan
    slots: NDArray[np.int64]  # one for each row


class VerifiedStep(NamedTuple):
    """A step of one request after verification, before any row of it is kept or released."""

    request: Request
    engine_index: int
    plan: Plan
    slots: NDArray[np.int64]
    verdicts: list[Verdict]  # one for each part of the plan
    logits: list[
        NDArray[np.float32]
    ]  # of the wanted rows of each part, valid until the next engine call; [] if unneeded
    held: int  # KV slots held during the step
    queued: tuple[Thread, ...]  # threads that waited during the step
    engine_seconds: float  # of the call that the step was part of
    outside_seconds: float  # spent on earlier steps of the request outside the engine


class Observer(Protocol):
    """Sees every step of a request with its verdicts, and with its logits unless its `needs_logits` is False."""

    def on_step(self, verified: VerifiedStep) -> None:
        """Called once per verified step; what it needs is in the step, so observers may come in any order."""


class Request:
    """One generation under way."""

    def __init__(
        self,
        prompt: Sequence[int],
        config: RequestConfig,
        capacity: int,
        lowering: Lowering,
        *,
        drafter: Drafter | None = None,
        listener: Listener | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        root = new_thread(prompt, capacity, lookup=config.draft_config.lookup > 0)
        self.config = config
        self.slots = Slots(capacity, lowering)
        self.threads = [root]  # all that there were
        self.live = [root]  # those that take part in the next step
        self.queue: list[Thread] = []  # those that wait for one of these to end
        self.observers = tuple(observers)
        self.statistics = Statistics(prompt_tokens=len(prompt))
        # whether the best tokens of each row serve it as well as all logits do
        self.selects = getattr(config.selector, "selects", False) and not (
            config.echo is not None or any(getattr(observer, "needs_logits", True) for observer in observers)
        )
        self._listener = listener or NullListener()
        self._drafter = drafter or drafter_for(config.draft_config, config.planner, config.kind)
        self._written = 0  # tokens, of all threads
        self._prefilled = False

    @property
    def prefilling(self) -> bool:
        """Whether it has written nothing yet: its next step feeds a chunk of the prompt."""
        return not self._prefilled

    @property
    def added(self) -> int:
        """Tokens behind the prompt, in all threads, each [Child] included."""
        return self._written + len(self.threads) - 1

    @property
    def silent_rows(self) -> int:
        """Prompt rows to feed before the first one whose logits are wanted."""
        root, echo = self.threads[0], self.config.echo
        return max(0, (len(root.tokens) if echo is None else echo) - root.fed)

    def draft(self, prefill_rows: int, call: SharedCall | None = None) -> list[Draft]:
        """The drafts of the live threads; one thread in a call with other requests gets as many rows as these agree on."""
        sharing = Sharing(len(self.live), self.slots.height, call)
        return [self._draft(thread, prefill_rows, sharing) for thread in self.live]

    def plan(self, prefill_rows: int, drafts: Sequence[Draft] | None = None) -> Plan:
        """The rows of the next step, those of every live thread; none of them feeds more known tokens than this."""
        drafts = self.draft(prefill_rows) if drafts is None else drafts
        if len(self.live) == 1 and not self.live[0].waits_for_fork:
            return Plan((self._part(self.live[0], drafts[0], prefill_rows, None),))
        parts: list[Part] = []
        first = 0
        feeding: dict[tuple[int, ...], int] = {}  # thread that feeds nothing but its last token -> that row
        for thread, draft in zip(self.live, drafts, strict=True):
            anchor = feeding.get(thread.path[:-1]) if thread.waits_for_fork else None
            part = self._part(thread, draft, prefill_rows, anchor)
            if len(thread.tokens) - thread.fed == 1:
                feeding[thread.path] = first
            first += part.layout.rows
            parts.append(part)
        return Plan(tuple(parts))

    def keep(self, step: VerifiedStep) -> Moves:
        """Hold the slots of kept rows, release those of rejected rows, write the tokens; what the engine has to move."""
        kept: list[NDArray[np.int64]] = []
        written: list[int] = []
        first = 0
        for part, verdict in zip(step.plan.parts, step.verdicts, strict=True):
            slots = step.slots[first : first + part.layout.rows]
            first += part.layout.rows
            own = slots
            if len(verdict.retained) < slots.size:
                own = slots[list(verdict.retained)]
                rejected = np.ones(slots.size, np.bool_)
                rejected[list(verdict.retained)] = False
                self.slots.release(slots[rejected])
            self._feed(part, own)
            written.append(self._write(part, verdict, own))
            kept.append(own)
            self._prefilled = self._prefilled or bool(verdict.tokens)
        self.statistics.add_step(step.plan, step.verdicts, written, step.held)
        self._advance_queue()
        return self._settle(kept)

    def finish(self, ending: Ending) -> None:
        """End every thread where it is."""
        for thread in (*self.live, *self.queue):
            self._end(thread, ending)
        self._advance_queue()

    def abandon(self) -> None:
        """Release everything without reporting it: the request failed."""
        self.live, self.queue = [], []
        self.slots.clear()

    def _draft(self, thread: Thread, prefill_rows: int, sharing: Sharing) -> Draft:
        config, rows = self.config, max(1, STEP_ROWS // len(self.live))
        if config.max_rows is not None:  # the end of a prompt takes rows that its draft then cannot have
            known = min(len(thread.tokens) - thread.fed, prefill_rows)
            rows = max(1, min(rows, config.max_rows // len(self.live) - known + 1))
        remaining = min(config.max_length - len(thread.tokens), config.max_total - self.added)
        return self._drafter.draft(thread, remaining, rows, sharing)

    def _part(self, thread: Thread, draft: Draft, prefill_rows: int, anchor: int | None) -> Part:
        return plan_thread(thread, draft, self.config.tokens, prefill_rows, anchor, self.config.echo)

    def _feed(self, part: Part, own: NDArray[np.int64]) -> None:
        """Note which of a thread's tokens its kept rows have put into the KV cache, also for the threads that share them."""
        thread = part.thread
        thread.sees[own] = True
        begin = int(part.positions[0])
        thread.fed = begin + own.size
        if not thread.forks:
            return
        for child in (*self.live, *self.queue):
            if child.path[:-1] == thread.path and child.fork is not None and begin <= child.fork == child.fed:
                slot = own[child.fork - begin : child.fork - begin + 1]
                self.slots.share(slot)
                child.sees[slot] = True
                child.fed += 1

    def _write(self, part: Part, verdict: Verdict, own: NDArray[np.int64]) -> int:
        """Add tokens one by one, as plain decoding would, so that the text ends where it would; the number added."""
        thread, config = part.thread, self.config
        self._drafter.learn(part, verdict)  # before the guesses that the draft was made of are replaced
        thread.candidates = verdict.candidates
        before = self._written
        for index, token in enumerate(verdict.tokens):
            if thread.ending is not None or self.added >= config.max_total:
                break
            if token in config.end:
                self._end(thread, "end")
                break
            accepted = index < verdict.accepted
            thread.tokens.append(token)
            thread.drafted.append(accepted)
            self._written += 1
            stops = self._listener.on_token(thread, token, accepted)
            if token == config.tokens.fork and not stops and self.added < config.max_total:
                self._fork(thread, own[part.layout.known + index + 1 :])
            if stops:
                self._end(thread, "stop")
            elif len(thread.tokens) >= config.max_length:
                self._end(thread, "length")
        return self._written - before

    def _fork(self, parent: Thread, unseen: NDArray[np.int64]) -> None:
        """Begin the child thread behind a thread's last token; it does not see the parent's rows behind that."""
        assert self.config.tokens.child is not None
        child = parent.child(len(parent.tokens) - 1, self.config.tokens.child, unseen)
        self.slots.share(child.held)
        self.threads.append(child)
        self.queue.append(child)
        self.statistics.threads = len(self.threads)
        self._listener.on_fork(parent, child)
        if len(child.tokens) >= self.config.max_length:
            self._end(child, "length")

    def _advance_queue(self) -> None:
        """Drop the threads that have ended, and start queued ones in their place."""
        if self._prefilled and self.added >= self.config.max_total:
            for thread in (*self.live, *self.queue):
                self._end(thread, "total")
        if len(self.threads) > 1:
            for thread in (*self.live, *self.queue):
                if thread.ending is None and self._listener.is_cut_off(thread):
                    self._end(thread, "stop")
            self.queue = [thread for thread in self.queue if thread.ending is None]
        self.live = [thread for thread in self.live if thread.ending is None]
        while self.queue and len(self.live) < self.config.max_threads:
            self.live.append(self.queue.pop(0))

    def _end(self, thread: Thread, ending: Ending) -> None:
        if thread.ending is None:
            thread.ending = ending
            self.slots.release(thread.held)
            thread.sees[:] = False
            self._listener.on_end(thread)

    def _settle(self, kept: Sequence[NDArray[np.int64]]) -> Moves:
        """What an append engine has to move so that the kept rows take the lowest slots."""
        if self.slots.lowering == "scatter" or not self.live:
            return NO_MOVES
        moves = self.slots.settle(self.slots.still_held(np.concatenate(kept)))
        if moves[0].size:
            for thread in (*self.live, *self.queue):
                thread.move(*moves)
        return moves
