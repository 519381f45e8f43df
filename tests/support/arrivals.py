"""Arrivals: requests that arrive at a scheduler over a fake engine, and the failures that some of them cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import STEP_ROWS, Lowering
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import Candidates, DraftConfig, Source
from spaceport.runtime.decode.events import Listener, NullListener
from spaceport.runtime.decode.request import Observer, Request, VerifiedStep
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.scheduling.prefix_cache import PrefixCache
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.task import Task
from support.hash_engine import HashEngine, Language, Tree, request_for

Trouble = Literal["on_token", "on_end", "choice", "number", "observer", "progress"]


class Trap(Exception):
    """The error that a request fails with in a test."""


@dataclass(frozen=True)
class Arrival:
    """A request that arrives later."""

    prompt: Sequence[int]
    at: int = 0  # round before which it is submitted
    max_tokens: int = 20
    draft_config: DraftConfig = field(default_factory=DraftConfig)
    max_threads: int = 1
    max_depth: int = 0
    cancelled: int | None = None  # rounds after which it is cancelled
    patience: int | None = None  # rounds after which its deadline passes
    trouble: Trouble | None = None
    when: int = 0  # calls that succeed before one fails
    salt: str | None = None  # of the prefix cache; None: it takes no part

    def alone(self, language: Language) -> Tree:
        """The output of each of its threads without failures."""
        return language.tree(self.prompt, len(self.prompt) + self.max_tokens, self.max_depth)


@dataclass
class Fuse:
    """Raises after a number of uses."""

    left: int

    def touch(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Trap


@dataclass
class RaisingListener(NullListener):
    """A listener that raises after some tokens."""

    fuse: Fuse
    at_end: bool

    def on_token(self, thread: Thread, token: int, drafted: bool, source: Source | None = None) -> bool:
        if not self.at_end:
            self.fuse.touch()
        return False

    def on_end(self, thread: Thread) -> None:
        if self.at_end:
            self.fuse.touch()


@dataclass
class RaisingChoice:
    """A token selector that raises after some calls."""

    fuse: Fuse
    inner: TokenSelector

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        self.fuse.touch()
        return self.inner.token(logits, thread, ahead)

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return self.inner.candidates(logits, thread, position, most)


@dataclass
class RaisingObserver:
    """An observer that raises after some steps."""

    fuse: Fuse

    def on_step(self, step: VerifiedStep) -> None:
        self.fuse.touch()


@dataclass
class SharedEngine(HashEngine):
    """A fake engine that knows the request of each row, and fails on demand."""

    guests: list[Task] = field(default_factory=list)  # all tasks of the test
    poisoned: dict[int, int] = field(default_factory=dict)  # id of a request -> calls until its logits are NaN
    faulty: int | None = None  # index of the call that fails

    def __post_init__(self) -> None:
        super().__post_init__()
        self.owner = self._owner_of

    def _owner_of(self, index: int) -> object:
        """The salt of the request that uses an index, whose rows others of this salt may see; else the request itself."""
        tenant = self.tenant(index)
        salt = None if tenant is None else tenant.config.cache_salt
        return id(tenant) if salt is None else salt

    def tenant(self, index: int) -> Request | None:
        """The request that holds slots of an index; there is never more than one."""
        found = [guest.request for guest in self.guests if guest.index == index and guest.request.slots.held]
        assert len(found) < 2, "two requests share the buffers of one index"
        return found[0] if found else None

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if self.calls == self.faulty:
            self.calls += 1
            raise EngineFault("the fake engine failed")
        logits = super().run(batch)
        for line in range(batch.requests):
            tenant = self.tenant(batch.first + line)
            if tenant is None:
                continue
            self._hold_visible(batch, line, tenant)
            if id(tenant) in self.poisoned:
                self.poisoned[id(tenant)] -= 1
                if self.poisoned[id(tenant)] < 0:
                    logits[line] = np.nan
        return logits

    def _hold_visible(self, batch: Batch, line: int, tenant: Request) -> None:
        for row, slot in enumerate(batch.slot_ids[line]):
            own = int(slot) if self.lowering == "scatter" else int(batch.slot_ids[line, 0]) + row
            visible = np.flatnonzero(batch.attention_mask[line, 0, row])
            if own in visible:
                assert tenant.slots.still_held(visible).size == visible.size, "a row sees a slot that nobody holds"


@dataclass(eq=False, kw_only=True)
class CalledTask(Task):
    """A task that reports its progress with a callback."""

    call: Callable[[bool], None] = lambda done: None  # whether the task is done

    def on_progress(self) -> None:
        self.call(self.done)


class Scene:
    """Requests that arrive, and a clock that counts rounds."""

    def __init__(
        self,
        language: Language,
        arrivals: Sequence[Arrival],
        requests: int = 3,
        lowering: Lowering = "scatter",
        prompt_rows: int = 512,
        queue_limit: int = 10**6,
        faulty: int | None = None,
        row_cost: float = 0.0,  # in plain steps
        cache: PrefixCache | None = None,
    ) -> None:
        self.language, self.arrivals = language, arrivals
        self.alone = [arrival.alone(language) for arrival in arrivals]
        longest = max(len(a.prompt) + self._total(tree) for a, tree in zip(arrivals, self.alone, strict=True))
        widest = max(STEP_ROWS, prompt_rows if lowering == "append" else 0) + 8
        self.engine = SharedEngine(language, longest + widest + 1, requests, lowering, faulty=faulty)
        self.now = 0
        costs = relative_costs(row_cost)
        self.scheduler = Scheduler(
            self.engine, queue_limit, prompt_rows, clock=lambda: self.now, costs=costs, cache=cache
        )
        self.tasks = [self._task(*numbered) for numbered in enumerate(arrivals)]
        self.engine.guests.extend(self.tasks)
        self.reports: list[list[bool]] = [[] for _ in self.tasks]  # for each task: whether it was done at each report

    def play(self) -> None:
        """Run rounds until all requests have arrived and ended."""
        while self.now <= max(arrival.at for arrival in self.arrivals) or self.scheduler.busy:
            self.turn()
            assert self.now < 2000, "the scheduler does not come to an end"

    def turn(self) -> None:
        """Run a round, after what is due before it."""
        for arrival, task in zip(self.arrivals, self.tasks, strict=True):
            if arrival.at == self.now:
                self.scheduler.submit(task)
            if arrival.cancelled is not None and arrival.at + arrival.cancelled == self.now:
                task.cancelled = True
        self.scheduler.round()
        self.now += 1

    def text(self, number: int) -> Tree:
        """The output of each thread of a request."""
        return {thread.path: thread.generated for thread in self.tasks[number].request.threads}

    def _total(self, tree: Tree) -> int:
        return sum(len(text) for text in tree.values()) + len(tree)

    def _task(self, number: int, arrival: Arrival) -> Task:
        fuse = Fuse(arrival.when)
        listener: Listener | None = None
        observers: list[Observer] = []
        if arrival.trouble in ("on_token", "on_end"):
            listener = RaisingListener(fuse, arrival.trouble == "on_end")
        elif arrival.trouble == "observer":
            observers = [RaisingObserver(fuse)]
        request = request_for(
            self.engine,
            arrival.prompt,
            arrival.max_tokens,
            arrival.draft_config,
            max_threads=arrival.max_threads,
            max_depth=arrival.max_depth,
            total=self._total(self.alone[number]),
            listener=listener,
            observers=observers,
        )
        if arrival.trouble == "choice":
            request.config = replace(request.config, selector=RaisingChoice(fuse, request.config.selector))
        if arrival.salt is not None:
            request.config = replace(request.config, cache_salt=arrival.salt)
        if arrival.trouble == "number":
            self.engine.poisoned[id(request)] = arrival.when

        def on_progress(done: bool) -> None:
            self.reports[number].append(done)
            if arrival.trouble == "progress":
                fuse.touch()

        deadline = None if arrival.patience is None else arrival.at + arrival.patience
        return CalledTask(request=request, call=on_progress, deadline=deadline)


def steps_of(task: Task) -> int:
    """Number of steps of a request."""
    return task.request.statistics.prompt_steps + task.request.statistics.steps
