"""A request from its submission to its end, its completion, and the bounded queue in which it waits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from threading import Lock
from time import perf_counter
from typing import Any, Literal, cast

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.sequence import Ending, Event, EventLog, replay
from spaceport.runtime.decode.sequence_group import GROUP_ENDINGS, Observer, SequenceGroup, Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import Score, Scoring, TokenLogprob
from spaceport.runtime.text.messages import estimated_tokens
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece, ThreadText, Transcript
from spaceport.runtime.trace import Trace

# waiting: being prepared, or in the queue; prefill: it has KV buffers; decoding: it has generated tokens.
State = Literal["waiting", "prefill", "decoding", "done"]
Outcome = Ending | BaseException  # how a request ended: the error of a failed one

UNREAD_LIMIT = 4096  # tokens
_PATIENCE = 32  # events after which a patient reader is woken: it processes them within a step
_numbers = count(1)


@dataclass(frozen=True)
class Completion:
    """A finished completion.

    - `text`: The generated text, with the text of each child thread instead of its `[Fork]`.
    - `tokens`: The generated token ids, in the same order.
    - `ending`: Why generation ended: "total", "deadline" or "cancelled" if that ended any thread, else the ending of the
      root thread.
    - `statistics`: Counts and times of the request.
    - `prompt_tokens`: Token ids of the prompt; empty if the request ended before it was tokenized.
    - `threads`: All threads, parents before their children, the root thread first.
    - `logprobs`: Log probability of each of `tokens`; empty unless `Decoding.logprobs` was set.
    - `seed`: Seed of the sampled tokens; None with greedy decoding.
    - `trace`: What each step did; None unless `Decoding.trace` was set.
    """

    text: str
    tokens: tuple[int, ...]
    ending: Ending
    statistics: Statistics
    prompt_tokens: tuple[int, ...] = ()
    threads: tuple[ThreadText, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    trace: Trace | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Echo:
    """What to score instead of generating: a continuation of the prompt, or the prompt itself."""

    continuation: str | Sequence[int] | None
    top: int  # most probable tokens beside each token
    parse_special: bool


@dataclass(eq=False)
class Output:
    """The text of a request, its seed and trace.

    Without stop strings, the reader's OS thread turns `events` into text while the engine runs. With stop strings there
    are no `events`: the transcript listens to the sequences itself.
    """

    transcript: Transcript
    events: EventLog | None
    seed: int | None  # None: greedy decoding
    trace: Trace | None
    observers: tuple[Observer, ...] = ()  # that its parts need


def _ignore() -> None:
    """Ignore a change."""


class Request:
    """A request from its submission to its end; any OS thread may end it, the scheduler runs it, one reader reads it.

    Its `state` follows from what it has: sequences once it is prepared, KV buffers once it runs, an outcome once it is done.
    """

    def __init__(
        self,
        prompt: Prompt,
        decoding: Decoding,
        *,
        echo: Echo | None = None,
        observers: Sequence[Observer] = (),
        deadline: float | None = None,
    ) -> None:
        self.prompt: Prompt | None = prompt  # until it is prepared, or has ended
        self.begun = False  # whether its preparation has begun
        self.decoding = decoding
        self.echo = echo
        self.observers = observers
        self.deadline = deadline  # seconds of the scheduler's clock
        self.tokens = estimated_tokens(prompt if echo is None else (prompt, echo.continuation))  # of the prompt
        self.number = next(_numbers)  # of the process, for log entries
        self.submitted = perf_counter()
        self._sequences: SequenceGroup | None = None  # once it is in the queue of the scheduler
        self.output: Output | Scoring | None = None
        self.outcome: Outcome | None = None  # once it is done
        self.asked: Outcome | None = None  # how it shall end after the current step; set from any OS thread
        self.failure: BaseException | None = None  # why the scheduler fails it, whatever its reader asks meanwhile
        self.on_change: Callable[[], None] = _ignore  # called after each step, and when its state changes
        # Set by the scheduler only:
        self.index: int | None = None  # index of its KV buffers in the engine; None: it waits
        self.admitted = 0  # number of the round in which it got these buffers
        self.stepped = 0  # number of its last step in rounds in which tenants took turns
        self.parked: Any = None  # its KV rows, while others have the buffers that it had
        # a running request that computes the beginning of the prompt for both; None: it waits for none
        self.leader: Request | None = None
        self.common = 0  # number of prompt tokens for which it waits
        # Set by its reader only:
        self.patient = False  # waits for the whole completion, and need not be woken for each step
        self.unread_limit = UNREAD_LIMIT
        self._read = 0  # events or pieces
        self._counted = False  # whether its end was
        self._delivered = 0  # events or pieces, counted by the scheduler
        self._unread: deque[list[Event] | list[Piece]] = deque()
        self._lock = Lock()  # of the decisions that it starts and ends; nothing else is called while it is held

    @property
    def tenant(self) -> str:
        """On whose behalf it runs: tenants take turns."""
        return self.decoding.tenant

    @property
    def state(self) -> State:
        """Where it is between its submission and its end."""
        if self.outcome is not None:
            return "done"
        if self._sequences is None or self.index is None:
            return "waiting"
        return "prefill" if self._sequences.prefilling else "decoding"

    @property
    def prepared(self) -> bool:
        """Whether it has been in the queue of the scheduler, with its sequences."""
        return self._sequences is not None

    @property
    def sequences(self) -> SequenceGroup:
        """The sequences of a prepared request."""
        assert self._sequences is not None
        return self._sequences

    @property
    def done(self) -> bool:
        """Whether it has ended or failed."""
        return self.outcome is not None

    @property
    def error(self) -> BaseException | None:
        """Why it failed, or is about to."""
        errors = (self.outcome, self.failure, self.asked)
        return next((error for error in errors if isinstance(error, BaseException)), None)

    @property
    def statistics(self) -> Statistics:
        """Its counts and times so far."""
        return Statistics() if self._sequences is None else self._sequences.statistics

    @property
    def unread(self) -> int:
        """Number of events or pieces that its reader has not read."""
        return self._delivered - self._read

    @property
    def paused(self) -> bool:
        """Whether too much of it is unread; it keeps its KV slots, and can be cancelled or reach its deadline."""
        return self.unread >= self.unread_limit

    def begin(self) -> bool:
        """Begin to prepare it, which takes its prompt; returns whether it has not ended."""
        with self._lock:
            self.begun, self.prompt = True, None
            return self.outcome is None and self.asked is None

    def start(self, sequences: SequenceGroup) -> bool:
        """Give it to the scheduler; returns whether it has not ended meanwhile."""
        with self._lock:
            if self.outcome is None and self.asked is None:
                self._sequences = sequences
                self.tokens = sequences.statistics.prompt_tokens
            return self._sequences is not None

    def end(self, outcome: Outcome = "cancelled") -> None:
        """End it: at once if the scheduler does not have it, else with its current step."""
        with self._lock:
            if self.asked is None:
                self.asked = outcome
            if self.outcome is not None or self._sequences is not None:
                return
            self.outcome, self.prompt = self.asked, None
        self.changed()

    def finish(self, outcome: Outcome) -> None:
        """Note how it has ended, unless it is done."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
        self.changed()

    def count(self) -> bool:
        """Whether its end has not been counted yet; from now on it has."""
        with self._lock:
            counted, self._counted = self._counted, True
        return not counted

    def changed(self) -> None:
        """Tell its reader; an error of one reader, such as a closed event loop, affects no other request."""
        try:
            self._tell()
        except Exception:  # noqa: BLE001  (nobody else can use it)
            if self.asked is None:
                self.asked = "cancelled"

    def report(self, outcome: Outcome | None = None) -> None:
        """Pass on what the current step has added, and the outcome if it was the last step; raises the reader's error."""
        output = self.output
        if isinstance(output, Output):
            if self.patient and outcome is None and output.events is not None and output.events.count < _PATIENCE:
                return
            delivery = output.transcript.take() if output.events is None else output.events.take()
            if delivery:
                self._delivered += len(delivery)
                self._unread.append(delivery)
            elif outcome is None:
                return
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome
        self._tell()

    def read(self) -> list[Piece]:
        """The next pieces, those of one step; only its reader may call it. An error of its text ends the request."""
        pieces: list[Piece] = []
        while self._unread and not pieces:
            delivery = self._unread.popleft()
            self._read += len(delivery)
            assert isinstance(self.output, Output)
            if self.output.events is None:
                pieces += cast("list[Piece]", delivery)
                continue
            try:
                replay(cast("list[Event]", delivery), self.output.transcript)
                pieces += self.output.transcript.take()
            except Exception as error:
                self.end(error)
                raise
        return pieces

    def completion(self) -> Completion:
        """The completion, after all pieces were read; raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        if self._sequences is None:
            ending = cast("Ending", self.outcome)
            return Completion("", (), ending, Statistics(), threads=(ThreadText((), None, "", (), ending),))
        assert isinstance(self.output, Output)
        root, transcript = self.sequences.threads[0], self.output.transcript
        threads = transcript.finished()  # without those that ended behind a stop string, whatever ended them
        return Completion(
            transcript.text,
            transcript.tokens(),
            next((thread.ending for thread in threads if thread.ending in GROUP_ENDINGS), threads[0].ending),
            self.sequences.statistics,
            tuple(root.tokens[: root.start]),
            threads,
            transcript.logprobs(),
            self.output.seed,
            self.output.trace,
        )

    def score(self) -> Score:
        """The score of the text of a scoring request that has ended."""
        assert isinstance(self.output, Scoring)
        return self.output.score(self.statistics)

    def _tell(self) -> None:
        on_change = self.on_change
        if self.done:
            self.on_change = _ignore  # what it holds is free
        on_change()


class QueueFull(SpaceportError, RuntimeError):
    """The queue of waiting requests is full; try again later."""


class RequestQueue:
    """The requests that wait, in turns of their tenants; any OS thread may use it.

    What a tenant has taken out of the queue counts by its tokens: the one that would be served first is due, if all tenants
    that wait got equal numbers of tokens. The requests of one tenant are taken in the order in which they were prepared.
    """

    def __init__(self, limit: int, most_tokens: int | None = None) -> None:
        self.limit = limit  # requests beyond those that get KV buffers at once
        self._most_tokens = most_tokens  # prompt tokens of all waiting requests; None: any number
        self._prepared: dict[str, deque[Request]] = {}  # by tenant; none is empty
        self._preparing: set[Request] = set()  # those that are tokenized, or wait for that
        self._clock = 0.0  # tokens that a tenant would have got that has waited from the beginning
        self._due: dict[str, float] = {}  # on this clock, when a tenant is due
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of requests that wait, those that are being prepared included."""
        with self._lock:
            return len(self._waiting())

    @property
    def ready(self) -> bool:
        """Whether a prepared request waits."""
        return bool(self._prepared)

    def count(self, tenant: str) -> int:
        """Number of prepared requests of a tenant that wait."""
        return len(self._prepared.get(tenant, ()))

    def enter(self, request: Request, free: int) -> None:
        """Count a request that will be prepared; `free` others get KV buffers at once."""
        with self._lock:
            self._check(request, free, request.tokens, self.limit)
            self._preparing.add(request)

    def leave(self, request: Request) -> None:
        """Count a request no longer that was not prepared."""
        with self._lock:
            self._preparing.discard(request)

    def put(self, request: Request, sequences: SequenceGroup, free: int) -> None:
        """Add a prepared request, unless it has ended."""
        with self._lock:
            limit = None if request in self._preparing else self.limit
            self._preparing.discard(request)
            self._check(request, free, sequences.statistics.prompt_tokens, limit)
            if request.start(sequences):
                self._waiting_of(request.tenant).append(request)

    def put_back(self, request: Request) -> None:
        """Add a request that has run, before the others of its tenant."""
        with self._lock:
            self._waiting_of(request.tenant).appendleft(request)

    def due(self) -> list[Request]:
        """The next request of each tenant: first those that have run, then the one whose tenant is due first."""
        with self._lock:
            firsts = [
                request
                for waiting in self._prepared.values()
                for request in islice((request for request in waiting if not request.paused), 1)
            ]
            return sorted(firsts, key=lambda request: (request.parked is None, self._due[request.tenant]))

    def take(self, request: Request) -> None:
        """Remove a request that was due."""
        with self._lock:
            tenant, waiting = request.tenant, self._prepared.get(request.tenant, ())
            if request not in waiting:  # all were taken meanwhile
                return
            if request.parked is None:
                tokens = request.sequences.max_length
                self._clock = max(self._clock, self._due[tenant]) + tokens / len(self._prepared)
                self._due[tenant] += tokens
            self._keep({tenant: deque(other for other in waiting if other is not request)})

    def take_all(self) -> list[Request]:
        """All prepared requests that wait."""
        with self._lock:
            prepared, self._prepared = self._prepared, {}
        return list(chain.from_iterable(prepared.values()))

    def preparing(self) -> list[Request]:
        """The requests that are being prepared."""
        with self._lock:
            return list(self._preparing)

    def remove_done(self) -> None:
        """Remove the requests that have ended."""
        with self._lock:
            self._keep(
                {
                    tenant: deque(request for request in waiting if not request.done)
                    for tenant, waiting in self._prepared.items()
                }
            )

    def __iter__(self) -> Iterator[Request]:
        """The prepared requests that wait."""
        with self._lock:
            return iter(list(chain.from_iterable(self._prepared.values())))

    def _waiting_of(self, tenant: str) -> deque[Request]:
        """The prepared requests of a tenant, which gets a place if it has none."""
        if tenant not in self._prepared:
            self._prepared[tenant] = deque()
            self._due[tenant] = max(self._clock, self._due.get(tenant, 0.0))
        return self._prepared[tenant]

    def _keep(self, waiting: dict[str, deque[Request]]) -> None:
        """Keep these requests of some tenants; a tenant without any is forgotten once it has no more than the others."""
        self._prepared = {tenant: requests for tenant, requests in (self._prepared | waiting).items() if requests}
        self._due = {
            tenant: due
            for tenant, due in self._due.items()
            if tenant in self._prepared or (self._prepared and due > self._clock)
        }

    def _waiting(self) -> list[Request]:
        # what has ended before its preparation began does not count, nor what has made room for another tenant
        self._preparing = {request for request in self._preparing if request.begun or not request.done}
        waiting = (*chain.from_iterable(self._prepared.values()), *self._preparing)
        return [request for request in waiting if not isinstance(request.asked, QueueFull)]

    def _check(self, request: Request, free: int, tokens: int, limit: int | None) -> None:
        """Raise `QueueFull` if too many requests wait, or too many prompt tokens; a single one may have any number.

        If another tenant has more than half of what waits, its last requests make room instead.
        """
        while (fault := self._fault(waiting := self._waiting(), free, tokens, limit)) is not None:
            last = _last_of_most(waiting, request.tenant)
            if last is None:
                raise fault
            last.end(QueueFull("other clients wait, and this one has most of the queue: send fewer requests at a time"))

    def _fault(self, waiting: list[Request], free: int, tokens: int, limit: int | None) -> QueueFull | None:
        """Why another request with this number of prompt tokens cannot wait."""
        if limit is not None and len(waiting) >= limit + free:
            return QueueFull(
                f"{len(waiting) - free} requests wait already, queue_limit is {limit}: try again later, or "
                "raise queue_limit or max_requests"
            )
        if self._most_tokens is None or len(waiting) <= free:
            return None
        count = tokens + sum(request.tokens for request in waiting)
        if count <= self._most_tokens:
            return None
        return QueueFull(
            f"the requests that wait have {count} prompt tokens, queued_prompt_tokens is {self._most_tokens}: try again "
            "later, or raise it in Limits"
        )


def _last_of_most(waiting: list[Request], tenant: str) -> Request | None:
    """The last request of another tenant that has more than half of the requests or of their prompt tokens; None: none has."""
    places, tokens = Counter[str](), Counter[str]()
    for request in waiting:
        places[request.tenant] += 1
        tokens[request.tenant] += request.tokens
    for shares in (places, tokens):
        most = max(shares, key=shares.__getitem__, default=tenant)
        if most != tenant and 2 * shares[most] > sum(shares.values()):
            owned = [request for request in waiting if request.tenant == most and request.asked is None]
            return max(owned, key=lambda request: request.number, default=None)
    return None
