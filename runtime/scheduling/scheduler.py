"""Scheduler: continuous batching of many requests on one engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from threading import Lock
from time import monotonic, perf_counter

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.graphs.contract.signature import LOGIT_BYTES
from spaceport.runtime.costs import StepCosts, fixed_costs
from spaceport.runtime.decode.request import Request, ScheduledStep
from spaceport.runtime.decode.step import Call, StepInput, one_call, step
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.runtime.scheduling.buffers import FreeBuffers, Placement
from spaceport.runtime.scheduling.calls import group_by_width
from spaceport.runtime.scheduling.fair_rows import FairRows
from spaceport.runtime.scheduling.prefix_cache import PrefixCache
from spaceport.runtime.scheduling.status import TokenMeter
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.scheduling.watchdog import Heartbeat

_log = logging.getLogger("spaceport.runtime")

BESIDE_ROWS = 128  # maximum prompt rows in a round with decoding requests, which wait for them
_LEAST_BESIDE = 32  # the same on engines where rows are expensive; fewer would make prompts slow


class QueueFull(SpaceportError, RuntimeError):
    """The queue of waiting requests is full; try again later."""


class Abandoned(BaseException):
    """The engine call exceeded its time limit before it returned: its requests have failed already."""


class Scheduler:
    """Runs rounds of steps for requests; `submit` may be called from any OS thread, everything else from one at a time."""

    def __init__(
        self,
        engine: Engine,
        queue_limit: int,
        prompt_rows: int | None = None,  # maximum prompt rows of a call; None: the engine's default
        clock: Callable[[], float] = monotonic,
        costs: StepCosts | None = None,
        queued_tokens: int | None = None,  # maximum prompt tokens of waiting requests; None: any number
        cache: PrefixCache | None = None,
    ) -> None:
        self.engine = engine
        self.queue_limit = queue_limit
        self._queued_tokens = queued_tokens
        self._prompt_rows = min(prompt_rows or engine.costs.prompt_rows, engine.rows)
        self._costs = costs or fixed_costs(engine.costs.row)
        self._clock = clock  # for deadlines
        self._waiting: deque[Task] = deque()
        self._lock = Lock()  # guards the waiting tasks
        self._running: dict[int, Task] = {}  # by index in the engine; the first one gets the next prefill chunk
        self.cache = cache
        self.buffers = FreeBuffers(engine.requests, cache)
        self.heartbeat = Heartbeat()
        self.meter = TokenMeter()
        self.ended = self.failed = 0  # requests
        self._abandoned = False
        self._fair = FairRows(self._costs)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._running or self._waiting)

    @property
    def active(self) -> list[Request]:
        """The requests that have KV slots."""
        return [task.request for task in list(self._running.values())]

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def submit(self, task: Task) -> None:
        """Queue a request."""
        with self._lock:
            if len(self._waiting) >= self.queue_limit + len(self.buffers):
                raise QueueFull(
                    f"{len(self._waiting) - len(self.buffers)} requests wait already, queue_limit is {self.queue_limit}: try again later, or "
                    "raise queue_limit or max_requests"
                )
            self._check_tokens(task)
            self._waiting.append(task)

    def _check_tokens(self, task: Task) -> None:
        """Raise `QueueFull` if all waiting requests have too many prompt tokens; a single one may have any number."""
        if self._queued_tokens is None or len(self._waiting) <= len(self.buffers):
            return
        count = sum(each.request.statistics.prompt_tokens for each in (*self._waiting, task))
        if count > self._queued_tokens:
            raise QueueFull(
                f"the requests that wait have {count} prompt tokens, queued_prompt_tokens is {self._queued_tokens}: try again "
                "later, or raise it in Limits"
            )

    def round(self) -> int:
        """Run one step of every decoding request, and prefill chunks of others; returns the number of steps."""
        self.heartbeat.beat()
        started = perf_counter()
        self._dismiss()
        self._admit()
        inputs = self._inputs()
        beginning = any(each.request.prefilling for each in inputs)
        calls: list[tuple[int, int]] = []  # rows of each request, requests
        before = sum(each.request.statistics.tokens for each in inputs)
        inside = step(self.engine, inputs, self._group, self._failed, partial(self._observe, calls))
        ended = perf_counter()
        self.meter.add(sum(each.request.statistics.tokens for each in inputs) - before)
        outside = ended - started - inside
        if len(calls) == 1 and not beginning:
            self._costs.observe_outside(*calls[0], outside)
        for request, index, _ in inputs:
            task, statistics = self._running[index], request.statistics
            statistics.outside_seconds += outside
            statistics.seconds = ended - task.submitted
            if not statistics.first_token_seconds and not request.prefilling:
                statistics.first_token_seconds = statistics.seconds
                self.buffers.store_prompt(index, request)
            self._report(task)
        return len(inputs)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting and running requests with this error."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        self.buffers.forget_prefixes()
        for task in (*waiting, *self._running.values()):
            self._give_up(task, error)
            self._report(task)

    def abandon(self, error: BaseException) -> None:
        """Fail all requests while a call does not return; `round` raises `Abandoned` once it has, and must not run again.

        The state of the requests and of the engine belongs to that call, so nothing but the tasks is touched.
        """
        self._abandoned = True
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for task in (*waiting, *list(self._running.values())):
            if not task.done:
                task.fault, task.done = error, True
                self._count(task)
                with suppress(Exception):  # of one reader
                    task.on_progress()

    def _dismiss(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = self._clock()
        tasks = list(self._running.values())
        if self._waiting:
            with self._lock:
                tasks = [*self._waiting, *tasks]
        gone = [task for task in tasks if task.cancelled or (task.deadline is not None and now >= task.deadline)]
        for task in gone:
            try:
                task.request.finish("cancelled" if task.cancelled else "deadline")
            except Exception as error:  # noqa: BLE001  (an error of its listener fails the request)
                self._give_up(task, error)
            self._report(task)
        if gone:
            with self._lock:
                self._waiting = deque(task for task in self._waiting if not task.done)

    def _admit(self) -> None:
        """Give free KV buffers to waiting requests, first come, first served."""
        while self._waiting and (admitted := self._next()) is not None:
            placement, task = admitted
            self._running[placement.index] = task
            task.request.statistics.waiting_seconds = perf_counter() - task.submitted
            try:
                self.buffers.prepare(self.engine, task.request, placement)
            except Exception as error:  # noqa: BLE001  (fails the request that would get these buffers)
                self._give_up(task, error)
                self._report(task)

    def _next(self) -> tuple[Placement, Task] | None:
        with self._lock:
            if not self.buffers or not self._waiting:
                return None
            task = self._waiting.popleft()
            placement = self.buffers.take(task.request, self._running.keys())
            task.index = placement.index
            return placement, task

    def _inputs(self) -> list[StepInput]:
        """The requests of this round, in the order of their indices."""
        self._fair.share(self.active)
        decoding = [
            StepInput(task.request, index, self._prompt_rows)
            for index, task in self._running.items()
            if not task.request.prefilling and not task.paused
        ]
        if len(decoding) < len(self._running):
            decoding += self._prefilling(bool(decoding))
        return sorted(decoding, key=itemgetter(1)) if len(decoding) > 1 else decoding  # by engine index

    def _prefilling(self, beside: bool) -> list[StepInput]:
        """The requests that get a prefill chunk in this round, the longest waiting first."""
        rows = self._prompt_rows
        if beside:
            rows = min(rows, BESIDE_ROWS, max(_LEAST_BESIDE, self._fair.rows))
        lines = max(1, LOGIT_BYTES // (4 * self.engine.signature.vocab_size))  # rows of logits
        chosen: list[StepInput] = []
        for index, task in list(self._running.items()):
            request = task.request
            echoes = request.config.echo is not None
            budget = min(rows, request.silent_rows + lines) if echoes else rows
            if request.prefilling and (budget >= self._call_rows or not chosen):
                feeds = min(budget, len(request.threads[0].tokens) - request.threads[0].fed)
                rows -= feeds
                if echoes:
                    lines -= max(0, feeds - request.silent_rows)
                chosen.append(StepInput(request, index, budget))
                self._running[index] = self._running.pop(index)  # to the end: prompts take turns
        return chosen

    def _group(self, steps: Sequence[ScheduledStep]) -> Sequence[Call]:
        return one_call(steps) if len(steps) < 2 else group_by_width(steps, self._call_rows)

    def _observe(self, calls: list[tuple[int, int]], rows: int, requests: int, visible: int, seconds: float) -> None:
        self._check_abandoned()
        self.heartbeat.beat()
        calls.append((rows, requests))
        self._costs.observe(rows, requests, visible, seconds)

    @property
    def _call_rows(self) -> int:
        usual = self.engine.costs.call_rows
        if self._costs.fixed:
            return usual
        return min(self._costs.call_rows, 4 * usual) if self.engine.device == "cpu" else self._costs.call_rows

    def _check_abandoned(self) -> None:
        if self._abandoned:
            raise Abandoned

    def _failed(self, index: int, error: Exception) -> None:
        self._check_abandoned()
        if isinstance(error, EngineFault):  # the state of the engine is not known
            self.buffers.forget_prefixes()
        self._give_up(self._running[index], error)

    def _give_up(self, task: Task, error: BaseException) -> None:
        """Fail a request that has not ended yet."""
        if task.request.live:
            task.fault = error
            task.request.abandon()

    def _report(self, task: Task) -> None:
        """Report the progress of a request, and release its index if it has ended."""
        if task.done:
            return
        if not task.request.live:
            self._release(task)
        try:
            task.on_progress()
        except Exception as error:  # noqa: BLE001  (fails the request; its reader gets the error if possible)
            if not task.done:
                self._give_up(task, error)
                self._report(task)

    def _release(self, task: Task) -> None:
        task.done = True
        self._count(task)
        if task.index is not None and self._running.get(task.index) is task:
            del self._running[task.index]
            # rows of a prefill chunk have no logits that would show NaN
            self.buffers.release(task.index, task.request, task.fault is not None or task.request.prefilling)

    def _count(self, task: Task) -> None:
        self.ended += 1
        self.failed += task.fault is not None
        if task.fault is not None:  # its message may quote text of the request
            _log.warning("request %d failed: %s", task.number, type(task.fault).__name__)
            return
        request, statistics = task.request, task.request.statistics
        _log.debug(
            "request %d ended (%s): %d prompt tokens, %d tokens in %d steps and %.3f s, %.3f s of it in the queue",
            task.number,
            request.threads[0].ending,
            statistics.prompt_tokens,
            statistics.tokens,
            statistics.steps,
            statistics.seconds,
            statistics.waiting_seconds,
        )
