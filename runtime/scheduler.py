"""Scheduler: many requests on one engine: who is admitted, who takes part in which call, who has to go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Lock
from time import monotonic, perf_counter

from spaceport.runtime.engine import Engine
from spaceport.runtime.loop import Turn, plan, play
from spaceport.runtime.request import Request

PROMPT_ROWS = 512  # of a round that only feeds prompts: keeps the matrix products full, and the round interruptible
BESIDE_ROWS = 128  # of prompts in a round in which others write: these wait for it
_CALL_ROWS = 16  # rows that cost as much as a call with one row does; measured on a CPU, see docs/performance.md


class QueueFull(RuntimeError):
    """More requests wait than are allowed to."""


@dataclass
class Task:
    """A request on its way from the queue to its end."""

    request: Request
    news: Callable[[Task], None]  # called when it has taken a step, and when it is done
    deadline: float | None = None  # in monotonic() seconds
    cancelled: bool = False  # by anybody, at any time
    fault: BaseException | None = None  # what it failed of
    done: bool = False
    submitted: float = field(default_factory=perf_counter)


class Scheduler:
    """Requests in, rounds of steps out; `submit` may be called from anywhere, everything else by one OS thread."""

    def __init__(self, engine: Engine, queue_limit: int, prompt_rows: int = PROMPT_ROWS) -> None:
        self.engine = engine
        self.queue_limit = queue_limit
        self._prompt_rows = min(prompt_rows, engine.rows)
        self._waiting: deque[Task] = deque()
        self._lock = Lock()  # over those that wait
        self._running: dict[int, Task] = {}  # by index in the engine; the first to be served with a prompt is first
        self._free = list(range(engine.requests))
        heapify(self._free)

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
        for call in calls(turns):
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
            tasks = [*self._waiting, *self._running.values()]
            self._waiting.clear()
        for task in tasks:
            task.fault = task.fault or error
            task.request.abandon()
            self._tell(task)

    def _dismiss(self) -> None:
        """End what nobody wants any more or what is too late."""
        now = monotonic()
        with self._lock:
            tasks = [*self._waiting, *self._running.values()]
        for task in tasks:
            late = task.deadline is not None and now >= task.deadline
            if (task.cancelled or late) and task.request.live:
                try:
                    task.request.finish("cancelled" if task.cancelled else "deadline")
                except Exception as error:  # noqa: BLE001  (of what listens to it, told to whom it concerns)
                    task.fault = error
                    task.request.abandon()
                self._tell(task)
        with self._lock:
            self._waiting = deque(task for task in self._waiting if not task.done)

    def _admit(self) -> None:
        with self._lock:
            while self._free and self._waiting:
                task = self._waiting.popleft()
                task.request.index = heappop(self._free)  # the lowest: calls stay narrow
                task.request.statistics.waiting_seconds = perf_counter() - task.submitted
                self._running[task.request.index] = task

    def _prompts(self, beside: bool) -> list[Request]:
        """Whose prompts are fed in this round: as many as there are rows for, those that waited longest first."""
        rows = min(BESIDE_ROWS, self._prompt_rows) if beside else self._prompt_rows
        chosen: list[Request] = []
        for index, task in list(self._running.items()):
            if task.request.prompting and (rows >= _CALL_ROWS or not chosen):
                request = task.request
                request.chunk = rows
                rows -= len(request.threads[0].tokens) - request.threads[0].fed
                chosen.append(request)
                self._running[index] = self._running.pop(index)  # behind the others: no prompt keeps others waiting
        return chosen

    def _play(self, call: Sequence[Turn]) -> None:
        """One call of the engine; where it fails, everybody in it does."""
        try:
            play(self.engine, call, self._failed)
        except Exception as error:  # noqa: BLE001  (those whose call it is are told)
            for turn in call:
                self._failed(turn.request, error)

    def _failed(self, request: Request, error: Exception) -> None:
        task = self._running[request.index]
        task.fault = task.fault or error
        request.abandon()

    def _tell(self, task: Task) -> None:
        """Pass on what there is of a request, and let go of it when there will be no more."""
        task.done = not task.request.live
        if task.done and self._running.get(task.request.index) is task:
            del self._running[task.request.index]
            if task.fault is not None:
                self.engine.clear(task.request.index)
            heappush(self._free, task.request.index)
        task.news(task)


def calls(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Which turns share a call of the engine.

    A call computes as many rows for each of its requests as its widest plan has, also for requests between them that
    take no part. Turns of like width go together, and others too where a call of its own would cost more than that.
    """
    found: list[list[Turn]] = []
    for turn in sorted(turns, key=lambda turn: turn.plan.rows):
        if found and _cost([*found[-1], turn]) <= _cost(found[-1]) + _cost([turn]):
            found[-1].append(turn)
        else:
            found.append([turn])
    return [sorted(call, key=lambda turn: turn.request.index) for call in found]


def _cost(call: Sequence[Turn]) -> int:
    """Rows that a call computes, its own cost in rows included."""
    indices = [turn.request.index for turn in call]
    return (max(indices) - min(indices) + 1) * max(turn.plan.rows for turn in call) + _CALL_ROWS
