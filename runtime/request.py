"""Request: one prompt under way, with its threads, its slots and what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.manifest import TokenIds
from spaceport.runtime.accept import Verdict
from spaceport.runtime.draft import chain
from spaceport.runtime.plan import Part, Plan, plan_thread
from spaceport.runtime.sampling import Choose
from spaceport.runtime.slots import NO_MOVES, Moves, Slots
from spaceport.runtime.threads import Thread

# Hears each token of a thread as it is written and whether it was drafted; answers whether the text ends with it.
Listener = Callable[[Thread, int, bool], bool]


@dataclass
class Statistics:
    """What a request cost so far."""

    prompt_tokens: int = 0
    prompt_steps: int = 0  # steps that fed a part of the prompt and could write nothing yet
    steps: int = 0  # steps that wrote
    tokens: int = 0
    rows: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)  # candidates fed at each depth
    accepted_by_depth: list[int] = field(default_factory=list)
    peak_slots: int = 0
    engine_seconds: float = 0.0
    outside_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


@dataclass
class Request:
    """One prompt under way."""

    index: int  # which of the engine's requests this is
    slots: Slots
    threads: list[Thread]
    tokens: TokenIds
    choose: Choose
    listener: Listener
    limit: int  # longest a thread's tokens may become, prompt included
    mask_slots: int
    chunk: int  # most known tokens of a thread that one step feeds
    end: Collection[int] = ()
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def live(self) -> list[Thread]:
        return [thread for thread in self.threads if thread.ending is None]

    def plan(self) -> Plan:
        """The rows of the next step: those of every live thread."""
        return Plan(tuple(self._part(thread) for thread in self.live))

    def keep(self, plan: Plan, taken: NDArray[np.int64], verdicts: Sequence[Verdict]) -> Moves:
        """Hold the slots of kept rows, release the others, write the tokens; what the engine has to move for it."""
        self._count(plan, verdicts)
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
            part.thread.sees[own] = True
            part.thread.fed += own.size
            self._write(part.thread, verdict)
            if part.thread.ending is None:
                kept.append(own)
            else:
                self.release(part.thread)
        moves = self.slots.settle(np.concatenate(kept)) if kept else NO_MOVES
        if moves[0].size:
            for thread in self.live:
                thread.move(*moves)
        return moves

    def release(self, thread: Thread) -> None:
        """Give up the slots that a thread holds."""
        self.slots.release(thread.held)
        thread.sees[:] = False

    def _part(self, thread: Thread) -> Part:
        draft = chain(thread.candidates, self.mask_slots, self.limit - len(thread.tokens))
        return plan_thread(thread, draft, self.tokens, self.chunk)

    def _write(self, thread: Thread, verdict: Verdict) -> None:
        """Add tokens one by one, as plain decoding would, so that the text ends where it would."""
        thread.candidates = verdict.candidates
        for place, token in enumerate(verdict.tokens):
            if token in self.end:
                thread.ending = "end"
                return
            accepted = place < verdict.accepted
            thread.tokens.append(token)
            thread.drafted.append(accepted)
            self.statistics.tokens += 1
            if accepted:
                self.statistics.accepted_by_depth[place] += 1
            if self.listener(thread, token, accepted):
                thread.ending = "stop"
                return
            if len(thread.tokens) >= self.limit:
                thread.ending = "length"
                return

    def _count(self, plan: Plan, verdicts: Sequence[Verdict]) -> None:
        statistics = self.statistics
        statistics.rows += plan.rows
        statistics.peak_slots = max(statistics.peak_slots, self.slots.held)
        if any(verdict.tokens for verdict in verdicts):
            statistics.steps += 1
        else:
            statistics.prompt_steps += 1
        for part in plan.parts:
            for node in part.layout.nodes[1:]:
                depth = int(part.layout.offsets[node]) - part.layout.known
                while len(statistics.drafted_by_depth) <= depth:
                    statistics.drafted_by_depth.append(0)
                    statistics.accepted_by_depth.append(0)
                statistics.drafted_by_depth[depth] += 1


def new_thread(prompt: Sequence[int], capacity: int) -> Thread:
    """The first thread of a request."""
    return Thread((), list(prompt), len(prompt), np.zeros(capacity, np.bool_))
