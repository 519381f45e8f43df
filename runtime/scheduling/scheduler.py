"""Continuous batching: rounds of steps of many requests on one engine, and which steps share an engine call."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import monotonic, perf_counter

from spaceport.graphs.contract.signature import LOGIT_BYTES, STEP_ROWS
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.runtime.decode.draft import common
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decode.step import Call, step
from spaceport.runtime.engine import Engine, EngineFault
from spaceport.runtime.scheduling.prefix_cache import LEAST_COPIED, FreeBuffers
from spaceport.runtime.scheduling.request import Outcome, Request
from spaceport.runtime.scheduling.request_queue import RequestQueue

_log = logging.getLogger("spaceport.runtime")

BESIDE_ROWS = 128  # maximum prompt rows in a round with decoding requests, which wait for them
_LEAST_BESIDE = 32  # the same on engines where rows are expensive; fewer would make prompts slow
_REACH = 64  # maximum steps of different widths in one search; a longer search costs more than it saves
_SHARE = 2.0  # plain steps: maximum cost of all threads of requests with several threads together
_WINDOW = 10.0  # seconds over which tokens/s are measured
_INTERVAL = 0.25  # minimum seconds between two samples


def group_by_width(steps: Sequence[RequestStep], call_rows: int) -> list[list[RequestStep]]:
    """The steps of each engine call; `steps` are in the order of their indices.

    A call computes the rows of its widest plan for each of its requests, also for idle requests between them. So steps of
    similar width share a call: they are sorted by width and split where the total cost is lowest, with a fixed cost of
    `call_rows` rows for each call.
    """
    if not steps:
        return []
    span = steps[-1].engine_index - steps[0].engine_index + 1
    rows = [step.rows for step in steps]
    if span * max(rows) <= sum(rows) + call_rows:  # the usual case: a second call could not save its own cost
        return [list(steps)]
    ordered = sorted(steps, key=lambda step: (step.rows, step.engine_index))
    widths = [(step.engine_index, step.rows) for step in ordered]
    found, end = [], len(ordered)
    begins = _cuts(widths, call_rows)
    while end:
        call = ordered[begins[end] : end]
        found.append(sorted(call, key=lambda step: step.engine_index))
        end = begins[end]
    return found[::-1]


def _cuts(widths: Sequence[tuple[int, int]], call_rows: int) -> list[int]:
    """Start of the last call over the first N steps, for each N; a step is its index and its number of rows."""
    best, begins = [0], [0]  # lowest cost of the first N steps
    lowest = highest = widths[0][0]
    for end, (index, rows) in enumerate(widths, 1):
        low = high = index
        lowest, highest = min(lowest, index), max(highest, index)
        costs = [((highest - lowest + 1) * rows + call_rows, 0)]  # all in one
        for begin in range(end - 1, max(0, end - _REACH), -1):
            index = widths[begin][0]
            low, high = min(low, index), max(high, index)
            costs.append((best[begin] + (high - low + 1) * rows + call_rows, begin))
        cost, begin = min(costs)  # the fewest calls among equals
        best.append(cost)
        begins.append(begin)
    return begins


def fair_rows(costs: StepCosts) -> int:
    """Number of rows for which others wait in a round: they cost as much as two plain steps."""
    most = _SHARE * costs.seconds(1)
    return next((rows for rows in range(2, STEP_ROWS + 1) if costs.seconds(rows) > most), STEP_ROWS + 1) - 1


def find_leader(request: Request, running: Iterable[Request], reusable: int) -> tuple[Request | None, int]:
    """The request to wait for instead of computing a prompt alone, and the number of tokens that both begin with.

    `reusable` is the number of tokens whose rows are in KV buffers already. Requests that wait for another one lead none,
    so that no two wait for each other.
    """
    salt = request.sequences.cache_salt
    leader, longest = None, reusable + LEAST_COPIED - 1
    if salt is None:
        return leader, 0
    tokens = request.sequences.reusable
    for other in running:
        if other is request or other.leader is not None or not other.sequences.prefilling:
            continue
        if other.sequences.cache_salt == salt:
            shared = common(tokens, other.sequences.threads[0].tokens)
            if shared > longest:
                leader, longest = other, shared
    return leader, longest if leader is not None else 0


def has_computed(leader: Request, count: int) -> bool:
    """Whether a request has computed this many tokens of its prompt, or computes it no longer."""
    computes = leader.index is not None and not leader.done and leader.sequences.prefilling
    return not computes or leader.sequences.threads[0].fed >= count


class TokenMeter:
    """Counts generated tokens; one OS thread adds them, any may read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.tokens = 0
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])  # seconds, tokens until then

    def add(self, count: int) -> None:
        """Add generated tokens."""
        now = self._clock()
        if now - self._samples[-1][0] >= _INTERVAL:
            self._samples.append((now, self.tokens))
            while len(self._samples) > 1 and now - self._samples[1][0] > _WINDOW:
                self._samples.popleft()
        self.tokens += count

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last seconds."""
        now = self._clock()
        recent = [sample for sample in tuple(self._samples) if now - sample[0] <= _WINDOW]
        if not recent:
            return 0.0
        since, before = recent[0]
        return (self.tokens - before) / max(now - since, _INTERVAL)


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
        self._progress: float | None = None  # when a round began, or an engine call returned; None: nothing to do
        self.meter = TokenMeter()
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

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last progress; None: there is nothing to do. May be read from any OS thread."""
        progress = self._progress
        return None if progress is None else max(0.0, monotonic() - progress)

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._progress = None

    def enter(self, request: Request) -> None:
        """Count a request in the queue that will be prepared."""
        self.queue.enter(request, len(self.buffers))

    def submit(self, request: Request, sequences: SequenceGroup) -> None:
        """Queue a prepared request."""
        self.queue.put(request, sequences, len(self.buffers))

    def round(self) -> int:
        """Run one step of every decoding request, and prefill chunks of others; returns the number of steps."""
        started = perf_counter()
        self._progress = monotonic()
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
        leader, shared = find_leader(request, leaders, self.buffers.reusable(sequences).length)
        if leader is not None and not has_computed(leader, shared):
            request.leader, request.common = leader, shared
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
        return group_by_width(steps, self._call_rows)

    def _called(self) -> None:
        if self._abandoned:
            raise Abandoned
        self._progress = monotonic()
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
