"""Continuous batching: rounds of steps of many requests on one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import monotonic, perf_counter

from spaceport.graphs.contract.signature import LOGIT_BYTES, STEP_ROWS
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decode.step import Call, one_call, step
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.runtime.scheduling.prefix_cache import FreeBuffers
from spaceport.runtime.scheduling.progress import DraftLog, Heartbeat, TokenMeter
from spaceport.runtime.scheduling.request import Outcome, Request
from spaceport.runtime.scheduling.request_queue import RequestQueue
from spaceport.runtime.scheduling.rounds import fair_rows, find_leader, group_by_width, has_computed

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
        check: Callable[[], None] | None = None,  # raises if the results of an engine call must not be used
    ) -> None:
        self.engine = engine
        self.queue = RequestQueue(queue_limit, queued_tokens)
        self._prompt_rows = min(prompt_rows or engine.costs.prompt_rows, engine.rows)
        self._costs = costs or relative_costs(engine.costs.row)
        self._clock = clock  # for deadlines
        self._check = check
        self._running: dict[int, Request] = {}  # by index in the engine; the first one gets the next prefill chunk
        self.buffers = FreeBuffers(engine.requests)
        self.heartbeat = Heartbeat()
        self.meter = TokenMeter()
        self._draft_log = DraftLog()
        self.ended = self.failed = 0  # requests
        self._abandoned = False
        self._fair_rows = fair_rows(self._costs)

    @property
    def busy(self) -> bool:
        """Whether any prepared request waits or runs."""
        return bool(self._running) or self.queue.ready

    @property
    def active(self) -> list[SequenceGroup]:
        """The sequences of the requests that have KV buffers."""
        return [request.sequences for request in list(self._running.values())]

    def enter(self, request: Request) -> None:
        """Count a request in the queue that will be prepared."""
        self.queue.enter(request, len(self.buffers))

    def submit(self, request: Request, sequences: SequenceGroup) -> None:
        """Queue a prepared request."""
        self.queue.put(request, sequences, len(self.buffers))

    def round(self) -> int:
        """Run one step of every decoding request, and prefill chunks of others; returns the number of steps."""
        started = perf_counter()
        self.heartbeat.beat()
        self.queue.next_round()
        self._dismiss()
        self._resume()
        self._admit()
        steps = self._steps()
        before = sum([own.sequences.statistics.tokens for own in steps])
        inside = step(self.engine, steps, self._group, self._failed, self._called)
        ended = perf_counter()
        self.meter.add(sum([own.sequences.statistics.tokens for own in steps]) - before)
        outside = ended - started - inside
        for own in steps:
            request, statistics = self._running[own.engine_index], own.sequences.statistics
            statistics.outside_seconds += outside
            statistics.seconds = ended - request.submitted
            if not statistics.first_token_seconds and not own.sequences.prefilling:
                statistics.first_token_seconds = statistics.seconds
                self.buffers.store_prompt(own.engine_index, own.sequences)
            self._report(request)
        return len(steps)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting and running requests with this error."""
        self.buffers.cache.clear()
        for request in (*self.queue.take_all(), *self._running.values()):
            self._fail(request, error)
            self._report(request)

    def abandon(self, error: BaseException) -> None:
        """Fail all requests while a call does not return; `round` raises `Abandoned` once it has, and must not run again.

        Their sequences and the engine belong to that call, so nothing of them is touched.
        """
        self._abandoned = True
        for request in (*self.queue.take_all(), *list(self._running.values())):
            if not request.done:
                self._count(request, error)
                request.finish(error)

    def _dismiss(self) -> None:
        """End requests that were cancelled, that their readers failed, or that are past their deadline."""
        now = self._clock()
        gone = [
            request
            for request in (*self.queue.prepared(), *self._running.values())
            if request.asked is not None or (request.deadline is not None and now >= request.deadline)
        ]
        for request in gone:
            asked = request.asked or "deadline"
            with self._guarded(request):  # against errors of its listener
                if isinstance(asked, BaseException):
                    self._fail(request, asked)
                else:
                    request.sequences.finish(asked)
            self._report(request)
        if gone:
            self.queue.remove_done()
            self.queue.forget_tenants(self._running.values())

    def _admit(self) -> None:
        """Give KV buffers to waiting requests, in the order of the queue."""
        while self.queue.ready:
            admitted = self.queue.admit(self._running.values(), bool(self.buffers), self.engine.parks)
            if admitted is None:
                return
            request, preempted = admitted
            if preempted is not None:
                self._preempt(preempted)
            request.index = index = self.buffers.take(request.sequences, self._running.keys())
            self._running[index] = request
            if request.parked is None:
                self._begin(request, index)
                continue
            with self._guarded(request):
                self.buffers.restore(self.engine, request.sequences, index, request.parked)
            request.parked = None

    def _preempt(self, request: Request) -> None:
        """Keep the KV rows of a request elsewhere while others have its buffers."""
        assert request.index is not None
        sequences = request.sequences
        if sequences.slots.held:
            request.parked = self.engine.saved(request.index, sequences.slots.height)
        del self._running[request.index]
        self.buffers.park(request.index, sequences)
        request.index = request.leader = None
        self.queue.put_back(request)

    def _resume(self) -> None:
        """Begin the requests whose leader has computed what they have in common."""
        for index, request in list(self._running.items()):
            if request.leader is not None and has_computed(request.leader, request.common):
                self._begin(request, index)

    def _begin(self, request: Request, index: int) -> None:
        """Let a request reuse what is computed of its prompt, or wait for another one that computes more of it."""
        sequences = request.sequences
        leaders = self.queue.may_lead(request, self._running.values())
        leader, common = find_leader(request, leaders, self.buffers.reusable(sequences).length)
        if leader is not None and not has_computed(leader, common):
            request.leader, request.common = leader, common
            return
        if leader is not None and leader.index is not None:
            self.buffers.store_prompt(leader.index, leader.sequences)
        request.leader = None
        sequences.statistics.waiting_seconds = perf_counter() - request.submitted
        with self._guarded(request):
            self.buffers.prepare(self.engine, sequences, index)

    @contextmanager
    def _guarded(self, request: Request) -> Iterator[None]:
        """Let an error fail this request only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (its reader gets it)
            self._fail(request, error)
            self._report(request)

    def _steps(self) -> list[RequestStep]:
        """The steps of this round, in the order of their indices."""
        running = self._running
        several = [request.sequences for request in running.values() if len(request.sequences.threads) > 1]
        for sequences in several:
            sequences.limit_rows(STEP_ROWS if len(running) == 1 else self._fair_rows // len(several))
        decoding = {
            index: request
            for index, request in running.items()
            if not request.sequences.prefilling and not request.paused
        }
        stepping = self.queue.stepping(decoding, self._fair_rows)
        steps = [RequestStep(request.sequences, index, self._prompt_rows) for index, request in stepping.items()]
        if len(decoding) < len(running):
            steps += self._prompts(decoding.values())
        return sorted(steps, key=attrgetter("engine_index"))

    def _prompts(self, beside: Collection[Request]) -> list[RequestStep]:
        """The prefill chunks of this round beside decoding requests, those of the longest waiting first."""
        rows = self._prompt_rows
        if beside:
            rows = min(rows, BESIDE_ROWS, max(_LEAST_BESIDE, self._fair_rows))
        lines = max(1, LOGIT_BYTES // (4 * self.engine.signature.row_logits))  # rows of logits
        chosen: list[RequestStep] = []
        for index, request in list(self._running.items()):
            sequences = request.sequences
            if not sequences.prefilling or request.leader is not None:
                continue
            echoes = sequences.echo is not None
            budget = min(rows, sequences.silent_rows + lines) if echoes else rows
            budget = self.queue.prompt_rows(request, beside, budget, self._fair_rows)
            if budget and (budget >= self._call_rows or not chosen):
                feeds = min(budget, len(sequences.threads[0].tokens) - sequences.threads[0].fed)
                rows -= feeds
                if echoes:
                    lines -= max(0, feeds - sequences.silent_rows)
                chosen.append(RequestStep(sequences, index, budget))
                self.queue.prompt_fed(index, self._running)
        return chosen

    def _group(self, steps: Sequence[RequestStep]) -> Sequence[Call]:
        return one_call(steps) if len(steps) < 2 else group_by_width(steps, self._call_rows)

    def _called(self) -> None:
        if self._abandoned:
            raise Abandoned
        self.heartbeat.beat()
        if self._check is not None:
            self._check()

    @property
    def _call_rows(self) -> int:
        usual = self.engine.costs.call_rows
        if self._costs.relative:
            return usual
        return min(self._costs.call_rows, 4 * usual) if self.engine.device == "cpu" else self._costs.call_rows

    def _failed(self, index: int, error: Exception) -> None:
        if self._abandoned:
            raise Abandoned
        if isinstance(error, EngineFault):  # the state of the engine is not known
            self.buffers.cache.clear()
        self._fail(self._running[index], error)

    def _fail(self, request: Request, error: BaseException) -> None:
        """Let a request fail, if it has not ended yet."""
        if request.sequences.live:
            request.failure = error
            request.sequences.abandon()

    def _report(self, request: Request) -> None:
        """Report the progress of a request, and release its index if it has ended."""
        if request.outcome is not None:
            return
        outcome: Outcome | None = None
        if not request.sequences.live:
            outcome = request.error or request.sequences.ending
            assert outcome is not None
            self._release(request, outcome)
        try:
            request.report(outcome)
        except Exception as error:  # noqa: BLE001  (fails the request; its reader gets the error if possible)
            if not request.done:
                self._fail(request, error)
                self._report(request)

    def _release(self, request: Request, outcome: Outcome) -> None:
        request.parked = None
        self._count(request, outcome)
        if request.index is not None and self._running.get(request.index) is request:
            del self._running[request.index]
            self.queue.forget_tenants(self._running.values())
            # rows of a prefill chunk have no logits that would show NaN
            spoilt = isinstance(outcome, BaseException) or request.sequences.prefilling
            self.buffers.release(request.index, request.sequences, spoilt)

    def _count(self, request: Request, outcome: Outcome) -> None:
        """Count and log the end of a request, once."""
        if not request.mark_counted():
            return
        self.ended += 1
        if isinstance(outcome, BaseException):  # its message may quote text of the request
            self.failed += 1
            _log.warning("request %d failed: %s", request.number, type(outcome).__name__)
            return
        statistics = request.statistics
        self._draft_log.add(statistics)
        _log.debug(
            "request %d ended (%s): %d prompt tokens, %d tokens in %d steps and %.3f s, %.3f s of it in the queue",
            request.number,
            request.sequences.threads[0].ending,
            statistics.prompt_tokens,
            statistics.tokens,
            statistics.steps,
            statistics.seconds,
            statistics.waiting_seconds,
        )
