"""Scheduler: continuous batching of many requests on one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from time import monotonic, perf_counter

from spaceport.graphs.contract.signature import LOGIT_BYTES
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.runtime.decode.request import Request, ScheduledStep
from spaceport.runtime.decode.step import Call, StepInput, one_call, step
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.runtime.scheduling.buffers import FreeBuffers
from spaceport.runtime.scheduling.calls import group_by_width
from spaceport.runtime.scheduling.common_prompts import find_leader, has_computed
from spaceport.runtime.scheduling.fair_rows import FairRows
from spaceport.runtime.scheduling.prefix_cache import PrefixCache
from spaceport.runtime.scheduling.queue import RequestQueue, Reservation
from spaceport.runtime.scheduling.status import DraftLog, TokenMeter
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.scheduling.watchdog import Heartbeat

_log = logging.getLogger("spaceport.runtime")

BESIDE_ROWS = 128  # maximum prompt rows in a round with decoding requests, which wait for them
_LEAST_BESIDE = 32  # the same on engines where rows are expensive; fewer would make prompts slow


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
        self.queue = RequestQueue(queue_limit, queued_tokens)
        self._prompt_rows = min(prompt_rows or engine.costs.prompt_rows, engine.rows)
        self._costs = costs or relative_costs(engine.costs.row)
        self._clock = clock  # for deadlines
        self._running: dict[int, Task] = {}  # by index in the engine; the first one gets the next prefill chunk
        self.cache = cache
        self.buffers = FreeBuffers(engine.requests, cache)
        self.heartbeat = Heartbeat()
        self.meter = TokenMeter()
        self._draft_log = DraftLog()
        self.ended = self.failed = 0  # requests
        self._abandoned = False
        self._fair = FairRows(self._costs)

    @property
    def busy(self) -> bool:
        """Whether any admitted request waits or runs."""
        return bool(self._running) or self.queue.ready

    @property
    def active(self) -> list[Request]:
        """The requests that have KV slots."""
        return [task.request for task in list(self._running.values())]

    def reserve(self, tokens: int) -> Reservation:
        """A reservation in the queue for a request that is being admitted, with about this many prompt tokens."""
        return self.queue.reserve(len(self.buffers), tokens)

    def submit(self, task: Task, reservation: Reservation | None = None) -> None:
        """Queue an admitted request."""
        self.queue.put(task, len(self.buffers), reservation)

    def round(self) -> int:
        """Run one step of every decoding request, and prefill chunks of others; returns the number of steps."""
        self.heartbeat.beat()
        started = perf_counter()
        self._dismiss()
        self._resume()
        self._admit()
        inputs = self._inputs()
        before = sum(each.request.statistics.tokens for each in inputs)
        inside = step(self.engine, inputs, self._group, self._failed, self._called)
        ended = perf_counter()
        self.meter.add(sum(each.request.statistics.tokens for each in inputs) - before)
        outside = ended - started - inside
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
        self.buffers.forget_prefixes()
        for task in (*self.queue.take_all(), *self._running.values()):
            self._give_up(task, error)
            self._report(task)

    def abandon(self, error: BaseException) -> None:
        """Fail all requests while a call does not return; `round` raises `Abandoned` once it has, and must not run again.

        The state of the requests and of the engine belongs to that call, so nothing but the tasks is touched.
        """
        self._abandoned = True
        for task in (*self.queue.take_all(), *list(self._running.values())):
            if not task.done:
                task.fault, task.done = error, True
                self._count(task)
                with suppress(Exception):  # of one reader
                    task.on_progress()

    def _dismiss(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = self._clock()
        tasks = list(self._running.values())
        if self.queue.ready:
            tasks = [*self.queue, *tasks]
        gone = [task for task in tasks if task.cancelled or (task.deadline is not None and now >= task.deadline)]
        for task in gone:
            try:
                task.request.finish("cancelled" if task.cancelled else "deadline")
            except Exception as error:  # noqa: BLE001  (an error of its listener fails the request)
                self._give_up(task, error)
            self._report(task)
        if gone:
            self.queue.remove_done()

    def _admit(self) -> None:
        """Give free KV buffers to waiting requests, first come, first served."""
        while self.buffers and (task := self.queue.take()) is not None:
            task.index = self.buffers.take(task.request, self._running.keys())
            self._running[task.index] = task
            self._begin(task, task.index)

    def _resume(self) -> None:
        """Begin the requests whose leader has computed what they have in common."""
        for index, task in list(self._running.items()):
            if task.leader is not None and has_computed(task.leader, task.common):
                self._begin(task, index)

    def _begin(self, task: Task, index: int) -> None:
        """Let a request reuse what is computed of its prompt, or wait for another one that computes more of it."""
        leader, common = find_leader(task, self._running.values(), self.buffers.reusable(task.request))
        if leader is not None and not has_computed(leader, common):
            task.leader, task.common = leader, common
            return
        if leader is not None and leader.index is not None:
            self.buffers.store_prompt(leader.index, leader.request)
        task.leader = None
        task.request.statistics.waiting_seconds = perf_counter() - task.submitted
        try:
            self.buffers.prepare(self.engine, task.request, index)
        except Exception as error:  # noqa: BLE001  (fails the request that would get these buffers)
            self._give_up(task, error)
            self._report(task)

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
        lines = max(1, LOGIT_BYTES // (4 * self.engine.signature.row_logits))  # rows of logits
        chosen: list[StepInput] = []
        for index, task in list(self._running.items()):
            request = task.request
            echoes = request.config.echo is not None
            budget = min(rows, request.silent_rows + lines) if echoes else rows
            if request.prefilling and task.leader is None and (budget >= self._call_rows or not chosen):
                feeds = min(budget, len(request.threads[0].tokens) - request.threads[0].fed)
                rows -= feeds
                if echoes:
                    lines -= max(0, feeds - request.silent_rows)
                chosen.append(StepInput(request, index, budget))
                self._running[index] = self._running.pop(index)  # to the end: prompts take turns
        return chosen

    def _group(self, steps: Sequence[ScheduledStep]) -> Sequence[Call]:
        return one_call(steps) if len(steps) < 2 else group_by_width(steps, self._call_rows)

    def _called(self) -> None:
        self._check_abandoned()
        self.heartbeat.beat()

    @property
    def _call_rows(self) -> int:
        usual = self.engine.costs.call_rows
        if self._costs.relative:
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
        self._draft_log.add(statistics)
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
