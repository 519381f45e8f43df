"""Scheduler: many requests on one engine: who is admitted, who takes part in which call, who has to go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Lock
from time import monotonic, perf_counter

from spaceport.graphs.contract.signature import LOGIT_BYTES
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.step import Turn, plan, play
from spaceport.runtime.engine import Engine

PROMPT_ROWS = 512  # of a round that only feeds prompts: keeps the matrix products full, and the round interruptible
BESIDE_ROWS = 128  # of prompts in a round in which others write: these wait for it
_REACH = 64  # turns of different widths among which a call is sought; more would take longer than they save


class QueueFull(RuntimeError):
    """More requests wait than are allowed to."""


@dataclass
class Task:
    """A request on its way from the queue to its end."""

    request: Request
    news: Callable[[Task], None]  # called when it has taken a step, and when it is done
    deadline: float | None = None  # in seconds of the scheduler's clock
    cancelled: bool = False  # by anybody, at any time
    fault: BaseException | None = None  # what it failed of
    done: bool = False
    submitted: float = field(default_factory=perf_counter)


class Scheduler:
    """Requests in, rounds of steps out; `submit` may be called from anywhere, everything else by one OS thread."""

    def __init__(
        self,
        engine: Engine,
        queue_limit: int,
        prompt_rows: int = PROMPT_ROWS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.engine = engine
        self.queue_limit = queue_limit
        self._prompt_rows = min(prompt_rows, engine.rows)
        self._clock = clock  # what deadlines are measured with
        self._waiting: deque[Task] = deque()
        self._lock = Lock()  # over those that wait
        self._running: dict[int, Task] = {}  # by index in the engine; the first to be served with a prompt is first
        self._free = list(range(engine.requests))  # a heap
        self._spoilt: set[int] = set()  # of these: whose buffers a request that failed has left behind

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._running or self._waiting)

    def submit(self, task: Task) -> None:
        """Let a request wait for its turn."""
        with self._lock:
            if len(self._waiting) >= self.queue_limit + len(self._free):
                raise QueueFull(
                    f"{len(self._waiting)} requests wait already, queue_limit is {self.queue_limit}: try again later, or "
                    "raise queue_limit or max_requests"
                )
            self._waiting.append(task)

    def round(self) -> None:
        """One step of everybody who writes, and some rows of the prompts of those who do not yet."""
        started = perf_counter()
        self._dismiss()
        self._admit()
        writing = [task.request for task in self._running.values() if not task.request.prompting]
        chosen = sorted((*writing, *self._prompts(bool(writing))), key=lambda request: request.index)
        turns = plan(chosen, self._failed)
        inside = 0.0
        for call in calls(turns, self.engine.costs.call_rows):
            before = call[0].request.statistics.engine_seconds
            self._play(call)
            inside += call[0].request.statistics.engine_seconds - before
        outside = perf_counter() - started - inside
        for request in chosen:
            request.statistics.outside_seconds += outside
            self._tell(self._running[request.index])

    def fail(self, error: BaseException) -> None:
        """Give up on everything: what waits and what runs fails of this."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for task in (*waiting, *self._running.values()):
            self._give_up(task, error)
            self._tell(task)

    def _dismiss(self) -> None:
        """End what nobody wants any more or what is too late."""
        now = self._clock()
        with self._lock:
            tasks = [*self._waiting, *self._running.values()]
        gone = [task for task in tasks if task.cancelled or (task.deadline is not None and now >= task.deadline)]
        for task in gone:
            try:
                task.request.finish("cancelled" if task.cancelled else "deadline")
            except Exception as error:  # noqa: BLE001  (of what listens to it, told to whom it concerns)
                self._give_up(task, error)
            self._tell(task)
        if gone:
            with self._lock:
                self._waiting = deque(task for task in self._waiting if not task.done)

    def _admit(self) -> None:
        """Give each free index to the one that waits longest."""
        while task := self._next():
            self._running[task.request.index] = task
            task.request.statistics.waiting_seconds = perf_counter() - task.submitted
            if task.request.index in self._spoilt:
                try:
                    self.engine.clear(task.request.index)
                except Exception as error:  # noqa: BLE001  (whose buffers they would have been is told)
                    self._give_up(task, error)
                    self._tell(task)
                else:
                    self._spoilt.remove(task.request.index)

    def _next(self) -> Task | None:
        with self._lock:
            if not self._free or not self._waiting:
                return None
            task = self._waiting.popleft()
            task.request.index = heappop(self._free)  # the lowest: calls stay narrow
            return task

    def _prompts(self, beside: bool) -> list[Request]:
        """Whose prompts are fed in this round: as many as there are rows for, those that waited longest first."""
        rows = min(BESIDE_ROWS, self._prompt_rows) if beside else self._prompt_rows
        lines = max(1, LOGIT_BYTES // (4 * self.engine.signature.vocab_size))  # of logits
        chosen: list[Request] = []
        for index, task in list(self._running.items()):
            request = task.request
            room = rows if request.echo is None else min(rows, request.silent + lines)
            if request.prompting and (room >= self.engine.costs.call_rows or not chosen):
                request.chunk = room
                feeds = min(room, len(request.threads[0].tokens) - request.threads[0].fed)
                rows -= feeds
                if request.echo is not None:
                    lines -= max(0, feeds - request.silent)
                chosen.append(request)
                self._running[index] = self._running.pop(index)  # behind the others: no prompt keeps others waiting
        return chosen

    def _play(self, call: Sequence[Turn]) -> None:
        """One call of the engine; where it fails, everybody in it does who has not just ended."""
        try:
            play(self.engine, call, self._failed)
        except Exception as error:  # noqa: BLE001  (those whose call it is are told)
            for turn in call:
                self._failed(turn.request, error)

    def _failed(self, request: Request, error: Exception) -> None:
        self._give_up(self._running[request.index], error)

    def _give_up(self, task: Task, error: BaseException) -> None:
        """Let a request that is under way fail of this."""
        if task.request.live:
            task.fault = error
            task.request.abandon()

    def _tell(self, task: Task) -> None:
        """Pass on what there is of a request, and let go of it when there will be no more."""
        if not task.request.live:
            self._let_go(task)
        try:
            task.news(task)
        except Exception as error:  # noqa: BLE001  (its reader is told, if it can be told anything)
            if not task.done:
                self._give_up(task, error)
                self._tell(task)

    def _let_go(self, task: Task) -> None:
        task.done = True
        index = task.request.index
        if self._running.get(index) is task:
            del self._running[index]
            if task.fault is not None:
                self._spoilt.add(index)
            heappush(self._free, index)


def calls(turns: Sequence[Turn], call_rows: int) -> list[list[Turn]]:
    """Which turns, given in the order of their requests, share a call of the engine.

    A call computes as many rows for each of its requests as its widest plan has, also for requests between them that
    take no part. So turns of like width go together: in the order of their widths they are cut where it costs least,
    if a call takes as long as so many rows.
    """
    if not turns:
        return []
    span = turns[-1].request.index - turns[0].request.index + 1
    rows = [turn.plan.rows for turn in turns]
    if span * max(rows) <= sum(rows) + call_rows:  # the usual case: no second call could save its own cost
        return [list(turns)]
    ordered = sorted(turns, key=lambda turn: (turn.plan.rows, turn.request.index))
    places = [(turn.request.index, turn.plan.rows) for turn in ordered]
    found, end = [], len(ordered)
    begins = _cuts(places, call_rows)
    while end:
        call = ordered[begins[end] : end]
        found.append(sorted(call, key=lambda turn: turn.request.index))
        end = begins[end]
    return found[::-1]


def _cuts(places: Sequence[tuple[int, int]], call_rows: int) -> list[int]:
    """Where the last call of the first so many turns begins; each is told by its index and its rows."""
    best, begins = [0], [0]  # the least cost of the first so many turns
    lowest = highest = places[0][0]
    for end, (index, rows) in enumerate(places, 1):
        low = high = index
        lowest, highest = min(lowest, index), max(highest, index)
        costs = [((highest - lowest + 1) * rows + call_rows, 0)]  # all in one
        for begin in range(end - 1, max(0, end - _REACH), -1):
            index = places[begin][0]
            low, high = min(low, index), max(high, index)
            costs.append((best[begin] + (high - low + 1) * rows + call_rows, begin))
        cost, begin = min(costs)  # of equals the one with the fewest calls
        best.append(cost)
        begins.append(begin)
    return begins
