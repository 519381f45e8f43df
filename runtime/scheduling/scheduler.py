"""Continuous batching: rounds of steps of many requests on one engine."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from time import monotonic, perf_counter

from spaceport.graphs.contract.signature import LOGIT_BYTES
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.sequence_group import ScheduledStep, SequenceGroup, Statistics
from spaceport.runtime.decode.step import Call, StepInput, one_call, step
from spaceport.runtime.engine import Engine, EngineFault, parking
from spaceport.runtime.scheduling.prefix_cache import FreeBuffers, PrefixCache
from spaceport.runtime.scheduling.request import Outcome, Request, RequestQueue
from spaceport.runtime.scheduling.rounds import FairRows, find_leader, group_by_width, has_computed

_log = logging.getLogger("spaceport.runtime")

BESIDE_ROWS = 128  # maximum prompt rows in a round with decoding requests, which wait for them
_LEAST_BESIDE = 32  # the same on engines where rows are expensive; fewer would make prompts slow
_LEAST_ROUNDS = 8  # that a request keeps its KV buffers while tenants with several requests take turns
_MOST_PARKED = 2.0  # parked requests for each running one; a quarter of them for tenants with several requests
STOPPED_AFTER = 256  # steps without drafts after which they have stopped
_WINDOW = 10.0  # seconds over which tokens/s are measured
_INTERVAL = 0.25  # minimum seconds between two samples


class DraftLog:
    """Logs once when ended requests have drafted nothing any more, with the usual reason, and when drafts resume."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # drafts that were limited since the last draft, by reason
        self._steps = self._requests = 0  # that drafted nothing since then
        self._stopped = False

    def add(self, request: Statistics) -> None:
        """Count the steps of a request that has ended."""
        if not request.candidate_rows + request.mask_rows:
            if not request.drafts_limited:
                return
            self._requests += 1
            self._steps += request.steps
            for reason, count in request.drafts_limited.items():  # one for each thread and step
                self._seen[reason] = self._seen.get(reason, 0) + count
            if not self._stopped and self._steps >= STOPPED_AFTER:
                self._stopped = True
                reason = max(self._seen, key=self._seen.__getitem__)
                _log.info("the last %s drafted nothing: %s", self._stretch, REASONS[reason])
        elif self._seen:
            if self._stopped:
                _log.info("drafts resumed: the %s before drafted nothing", self._stretch)
            self._seen, self._requests, self._steps, self._stopped = {}, 0, 0, False

    @property
    def _stretch(self) -> str:
        requests = "request" if self._requests == 1 else f"{self._requests} requests"
        return f"{requests} with {self._steps} steps"


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


class Heartbeat:
    """When the worker last made progress; `age` may be read from any OS thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the last progress; None: the worker has nothing to do."""
        last = self._last
        return None if last is None else max(0.0, self._clock() - last)

    def beat(self) -> None:
        """Note progress: a round begins, or an engine call has returned."""
        self._last = self._clock()

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._last = None


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
        self._running: dict[int, Request] = {}  # by index in the engine; the first one gets the next prefill chunk
        self.cache = cache
        self.buffers = FreeBuffers(engine.requests, cache)
        self.heartbeat = Heartbeat()
        self.meter = TokenMeter()
        self._draft_log = DraftLog()
        self.ended = self.failed = 0  # requests
        self._abandoned = False
        self._fair = FairRows(self._costs)
        self._rounds = 0
        self._loads = Counter[str]()  # requests of each tenant that have got KV buffers since it had none
        self._parking = parking(engine)

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
        self.heartbeat.beat()
        started = perf_counter()
        self._rounds += 1
        self._dismiss()
        self._resume()
        self._admit()
        inputs = self._inputs()
        before = sum([each.request.statistics.tokens for each in inputs])
        inside = step(self.engine, inputs, self._group, self._failed, self._called)
        ended = perf_counter()
        self.meter.add(sum([each.request.statistics.tokens for each in inputs]) - before)
        outside = ended - started - inside
        for sequences, index, _ in inputs:
            request, statistics = self._running[index], sequences.statistics
            statistics.outside_seconds += outside
            statistics.seconds = ended - request.submitted
            if not statistics.first_token_seconds and not sequences.prefilling:
                statistics.first_token_seconds = statistics.seconds
                self.buffers.store_prompt(index, sequences)
            self._report(request)
        return len(inputs)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting and running requests with this error."""
        self.buffers.forget_prefixes()
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
        requests = list(self._running.values())
        if self.queue.ready:
            requests = [*self.queue, *requests]
        gone = [
            each for each in requests if each.asked is not None or (each.deadline is not None and now >= each.deadline)
        ]
        for request in gone:
            asked = request.asked or "deadline"
            try:
                if isinstance(asked, BaseException):
                    self._fail(request, asked)
                else:
                    request.sequences.finish(asked)
            except Exception as error:  # noqa: BLE001  (an error of its listener fails the request)
                self._fail(request, error)
            self._report(request)
        if gone:
            self.queue.remove_done()
            for request in gone:
                self._forget(request.tenant)

    def _admit(self) -> None:
        """Give KV buffers to waiting requests, in turns of their tenants."""
        while due := self.queue.due():
            request = due[0] if self.buffers else self._make_room(due)
            if request is None:
                return
            self.queue.take(request)
            request.index = self.buffers.take(request.sequences, self._running.keys())
            request.admitted = self._rounds
            self._running[request.index] = request
            if request.parked is None:
                self._loads[request.tenant] += 1
                self._begin(request, request.index)
            else:
                self._restore(request, request.index)

    def _make_room(self, due: Sequence[Request]) -> Request | None:
        """Park a request for one that is due and whose tenant has less; returns the latter, None: all have their share."""
        running = list(self._running.values())
        held = Counter(request.tenant for request in running)
        several = [request for request in running if request.paused or self._load(request.tenant) > 1]
        if not several or self._parking is None:
            return None
        parked = sum(request.parked is not None for request in self.queue)
        for request in due:
            tenant = request.tenant
            alone = self._load(tenant) == 1
            if parked >= (_MOST_PARKED if alone else _MOST_PARKED / 4) * len(running):
                continue
            victims = [
                other
                for other in several
                if held[other.tenant] > held[tenant] + 1
                or (not held[tenant] and (alone or self._rounds - other.admitted >= _LEAST_ROUNDS))
            ]
            if victims:
                self._park(max(victims, key=lambda other: (other.paused, held[other.tenant], other.admitted)))
                return request
        return None

    def _park(self, request: Request) -> None:
        """Keep the KV rows of a request elsewhere while others have its buffers."""
        assert self._parking is not None
        assert request.index is not None
        sequences = request.sequences
        if sequences.slots.held:
            request.parked = self._parking.saved(request.index, sequences.slots.height)
        del self._running[request.index]
        self.buffers.park(request.index, sequences)
        request.index = request.leader = None
        self.queue.put_back(request)

    def _restore(self, request: Request, index: int) -> None:
        """Let a parked request go on."""
        assert self._parking is not None
        try:
            self.buffers.restore(self._parking, request.sequences, index, request.parked)
        except Exception as error:  # noqa: BLE001  (fails the request that would get these buffers)
            self._fail(request, error)
            self._report(request)
        request.parked = None

    def _resume(self) -> None:
        """Begin the requests whose leader has computed what they have in common."""
        for index, request in list(self._running.items()):
            if request.leader is not None and has_computed(request.leader, request.common):
                self._begin(request, index)

    def _begin(self, request: Request, index: int) -> None:
        """Let a request reuse what is computed of its prompt, or wait for another one that computes more of it."""
        sequences = request.sequences
        # prompts of other tenants with several requests may get few rows
        running = [
            other for other in self._running.values() if other.tenant == request.tenant or self._load(other.tenant) == 1
        ]
        leader, common = find_leader(request, running, self.buffers.reusable(sequences))
        if leader is not None and not has_computed(leader, common):
            request.leader, request.common = leader, common
            return
        if leader is not None and leader.index is not None:
            self.buffers.store_prompt(leader.index, leader.sequences)
        request.leader = None
        sequences.statistics.waiting_seconds = perf_counter() - request.submitted
        try:
            self.buffers.prepare(self.engine, sequences, index)
        except Exception as error:  # noqa: BLE001  (fails the request that would get these buffers)
            self._fail(request, error)
            self._report(request)

    def _inputs(self) -> list[StepInput]:
        """The requests of this round, in the order of their indices."""
        self._fair.share(self.active)
        running = self._running.values()
        writing = [request for request in running if not request.sequences.prefilling and not request.paused]
        stepping = self._fair.stepping(writing, self._load)
        decoding = [
            StepInput(request.sequences, index, self._prompt_rows)
            for index, request in self._running.items()
            if request in stepping
        ]
        if len(writing) < len(running):
            decoding += self._prefilling({request.tenant for request in writing})
        return sorted(decoding, key=itemgetter(1)) if len(decoding) > 1 else decoding  # by engine index

    def _load(self, tenant: str) -> int:
        """Number of requests of a tenant that wait, run, or have run since it had none."""
        return self._loads[tenant] + self.queue.count(tenant)

    def _prefilling(self, beside: Collection[str]) -> list[StepInput]:
        """The requests that get a prefill chunk in this round beside decoding ones of tenants, the longest waiting first."""
        rows = self._prompt_rows
        if beside:
            rows = min(rows, BESIDE_ROWS, max(_LEAST_BESIDE, self._fair.rows))
        # beside tenants with one request, those with several get few rows, and in every second round only
        most_of_many = rows
        if any(self._load(tenant) == 1 for tenant in beside):
            most_of_many = 0 if self._rounds % 2 else self._fair.rows
        lines = max(1, LOGIT_BYTES // (4 * self.engine.signature.row_logits))  # rows of logits
        chosen: list[StepInput] = []
        for index, request in list(self._running.items()):
            sequences = request.sequences
            echoes = sequences.echo is not None
            budget = min(rows, sequences.silent_rows + lines) if echoes else rows
            if most_of_many < budget and self._load(request.tenant) > 1:
                budget = most_of_many
            if budget and sequences.prefilling and request.leader is None and (budget >= self._call_rows or not chosen):
                feeds = min(budget, len(sequences.threads[0].tokens) - sequences.threads[0].fed)
                rows -= feeds
                if echoes:
                    lines -= max(0, feeds - sequences.silent_rows)
                chosen.append(StepInput(sequences, index, budget))
                self._to_end(request.tenant)
                self._running[index] = self._running.pop(index)
        return chosen

    def _to_end(self, tenant: str) -> None:
        """Let the prompts of other tenants get the next prefill chunk."""
        for index in [index for index, request in self._running.items() if request.tenant == tenant]:
            self._running[index] = self._running.pop(index)

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
        self._fail(self._running[index], error)

    def _fail(self, request: Request, error: BaseException) -> None:
        """Let a request fail, if it has not ended yet."""
        if request.sequences.live:
            request.failure = error
            request.sequences.abandon()

    def _report(self, request: Request) -> None:
        """Report the progress of a request, and release its index if it has ended."""
        if request.done:
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
            self._forget(request.tenant)
            # rows of a prefill chunk have no logits that would show NaN
            spoilt = isinstance(outcome, BaseException) or request.sequences.prefilling
            self.buffers.release(request.index, request.sequences, spoilt)

    def _forget(self, tenant: str) -> None:
        """Begin to count the requests of a tenant anew if it has none."""
        if not self.queue.count(tenant) and all(request.tenant != tenant for request in self._running.values()):
            self._loads.pop(tenant, None)

    def _count(self, request: Request, outcome: Outcome) -> None:
        if not request.count():
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
