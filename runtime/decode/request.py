"""Request: one prompt under way, with its threads, its slots and what was asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.draft import Draft, Drafting, Rates, chain, tree
from spaceport.runtime.decode.plan import Part, Plan, plan_thread
from spaceport.runtime.decode.slots import NO_MOVES, Moves, Slots
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import Ending, Thread
from spaceport.runtime.sampling.choice import Choose


class Listener(Protocol):
    """Hears what the threads of a request write."""

    def wrote(self, thread: Thread, token: int, drafted: bool) -> bool:
        """A thread has a token more; answers whether its text ends with it."""

    def forked(self, parent: Thread, child: Thread) -> None:
        """A thread has begun that hangs from the [Fork] which its parent just wrote."""

    def ended(self, thread: Thread) -> None:
        """A thread has ended."""

    def beyond(self, thread: Thread) -> bool:
        """Whether whatever a thread still writes is cut off by a stop string that stands before it."""


class Observer(Protocol):
    """Sees every step of a request, after it was judged and before anything of it is kept."""

    def saw(
        self, request: Request, plan: Plan, verdicts: Sequence[Verdict], lines: Sequence[NDArray[np.float32]]
    ) -> None:
        """One verdict and the logits of the wanted rows for each part of the plan."""


class Deaf:
    """A listener that nothing is of interest to."""

    def wrote(self, thread: Thread, token: int, drafted: bool) -> bool:
        return False

    def forked(self, parent: Thread, child: Thread) -> None:
        pass

    def ended(self, thread: Thread) -> None:
        pass

    def beyond(self, thread: Thread) -> bool:
        return False


@dataclass
class Request:
    """One prompt under way."""

    slots: Slots
    threads: list[Thread]  # all that there were
    tokens: TokenIds
    choose: Choose
    limit: int  # longest a thread's tokens may become, prompt and all before its forks included
    total: int  # most tokens that all threads together may add; 0: it ends when its prompt is fed
    drafting: Drafting = field(default_factory=Drafting)
    chunk: int = 512  # most known tokens of a thread that one step feeds
    widest: int | None = None  # most rows of a step: an engine may take no more; nothing: it takes any number
    max_threads: int = 1  # threads that write at the same time; the others wait for their turn
    listener: Listener = field(default_factory=Deaf)
    observers: tuple[Observer, ...] = ()
    echo: int | None = None  # place from which on observers see the logits of the prompt's rows too
    end: Collection[int] = ()
    statistics: Statistics = field(default_factory=Statistics)
    index: int = 0  # which of the engine's requests this is

    def __post_init__(self) -> None:
        self.live = list(self.threads)  # those that take part in the next step
        self.queue: list[Thread] = []  # those that wait for one of these to end
        self.rates = Rates()

    @property
    def added(self) -> int:
        """Tokens behind the prompt, in all threads."""
        return self.statistics.tokens + len(self.threads) - 1

    @property
    def prompting(self) -> bool:
        """Whether it has written nothing yet: its next step feeds a part of the prompt."""
        return not self.statistics.steps

    @property
    def silent(self) -> int:
        """How many rows of the prompt are still to be fed before those whose logits are wanted."""
        spine = self.threads[0]
        return max(0, (len(spine.tokens) if self.echo is None else self.echo) - spine.fed)

    def plan(self) -> Plan:
        """The rows of the next step: those of every live thread."""
        rows = max(1, STEP_ROWS // len(self.live))
        if len(self.live) == 1 and not self.live[0].waits_for_fork:
            return Plan((self._part(self.live[0], rows, None),))
        parts: list[Part] = []
        first = 0
        feeding: dict[tuple[int, ...], int] = {}  # thread that feeds nothing but its last token -> that row
        for thread in self.live:
            anchor = feeding.get(thread.path[:-1]) if thread.waits_for_fork else None
            part = self._part(thread, rows, anchor)
            if len(thread.tokens) - thread.fed == 1:
                feeding[thread.path] = first
            first += part.layout.rows
            parts.append(part)
        return Plan(tuple(parts))

    def keep(self, plan: Plan, taken: NDArray[np.int64], verdicts: Sequence[Verdict]) -> Moves:
        """Hold the slots of kept rows, release the others, write the tokens; what the engine has to move for it."""
        self.statistics.count(plan, verdicts, self.slots.held)
        kept: list[NDArray[np.int64]] = []
        first = 0
        for part, verdict in zip(plan.parts, verdicts, strict=True):
            slots = taken[first : first + part.layout.rows]
            first += part.layout.rows
            own = slots
            if len(verdict.kept) < slots.size:
                own = slots[list(verdict.kept)]
                rejected = np.ones(slots.size, np.bool_)
                rejected[list(verdict.kept)] = False
                self.slots.release(slots[rejected])
            self._feed(part, own)
            self._write(part, verdict, own)
            kept.append(own)
        self._turn()
        return self._settle(kept)

    def finish(self, ending: Ending) -> None:
        """End every thread where it is."""
        for thread in (*self.live, *self.queue):
            self._end(thread, ending)
        self._turn()

    def abandon(self) -> None:
        """Let go of everything and tell nobody: the request failed."""
        self.live, self.queue = [], []
        self.slots.clear()

    def _part(self, thread: Thread, rows: int, anchor: int | None) -> Part:
        if self.widest is not None:  # the end of a prompt takes rows that its draft then cannot have
            known = min(len(thread.tokens) - thread.fed - (anchor is not None), self.chunk)
            rows = max(1, min(rows, self.widest // len(self.live) - known + 1))
        return plan_thread(thread, self._draft(thread, rows), self.tokens, self.chunk, anchor, self.echo)

    def _draft(self, thread: Thread, rows: int) -> Draft:
        drafting, room = self.drafting, min(self.limit - len(thread.tokens), self.total - self.added)
        if drafting.shape == "chain":
            rows = min(rows, (drafting.mask_slots + 1) ** 2)
            return chain([guess.tokens[0] for guess in thread.guesses], drafting.mask_slots, room, rows)
        looked_up: Sequence[int] = ()
        if thread.lookup is not None:
            looked_up = thread.lookup.following(thread.tokens, drafting.lookup)
        return tree(thread.guesses, looked_up, drafting, room, min(rows, drafting.rows), self.rates)

    def _feed(self, part: Part, own: NDArray[np.int64]) -> None:
        """Note what a thread's kept rows have put into the KV buffer, for the threads too that hang from them."""
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

    def _write(self, part: Part, verdict: Verdict, own: NDArray[np.int64]) -> None:
        """Add tokens one by one, as plain decoding would, so that the text ends where it would."""
        thread = part.thread
        if self.drafting.shape == "tree":
            nodes = [part.layout.nodes.index(row) for row in verdict.kept[part.layout.known :]]
            self.rates.heard(part.draft, len(thread.guesses), nodes)
        thread.guesses = verdict.guesses
        for place, token in enumerate(verdict.tokens):
            if thread.ending is not None or self.added >= self.total:
                break
            if token in self.end:
                self._end(thread, "end")
                break
            accepted = place < verdict.accepted
            thread.tokens.append(token)
            thread.drafted.append(accepted)
            self.statistics.wrote(part, verdict, place)
            stops = self.listener.wrote(thread, token, accepted)
            if token == self.tokens.fork and not stops and self.added < self.total:
                self._fork(thread, own[part.layout.known + place + 1 :])
            if stops:
                self._end(thread, "stop")
            elif len(thread.tokens) >= self.limit:
                self._end(thread, "length")

    def _fork(self, parent: Thread, unseen: NDArray[np.int64]) -> None:
        """Begin the thread that hangs from a thread's last token; it does not see the parent's rows behind that."""
        assert self.tokens.child is not None
        child = parent.child(len(parent.tokens) - 1, self.tokens.child, unseen)
        self.slots.share(child.held)
        self.threads.append(child)
        self.queue.append(child)
        self.statistics.threads += 1
        self.listener.forked(parent, child)
        if len(child.tokens) >= self.limit:
            self._end(child, "length")

    def _turn(self) -> None:
        """Let go of the threads that ended, and let those begin whose turn it is."""
        if self.added >= self.total and not self.prompting:
            for thread in (*self.live, *self.queue):
                self._end(thread, "total")
        if len(self.threads) > 1:
            for thread in (*self.live, *self.queue):
                if thread.ending is None and self.listener.beyond(thread):
                    self._end(thread, "stop")
            self.queue = [thread for thread in self.queue if thread.ending is None]
        self.live = [thread for thread in self.live if thread.ending is None]
        while self.queue and len(self.live) < self.max_threads:
            self.live.append(self.queue.pop(0))

    def _end(self, thread: Thread, ending: Ending) -> None:
        if thread.ending is None:
            thread.ending = ending
            self.slots.release(thread.held)
            thread.sees[:] = False
            self.listener.ended(thread)

    def _settle(self, kept: Sequence[NDArray[np.int64]]) -> Moves:
        """What an append engine has to move so that the rows kept stand as low as they can."""
        if self.slots.lowering == "scatter" or not self.live:
            return NO_MOVES
        moves = self.slots.settle(self.slots.still_held(np.concatenate(kept)))
        if moves[0].size:
            for thread in (*self.live, *self.queue):
                thread.move(*moves)
        return moves
