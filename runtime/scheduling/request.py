"""A request from its submission to its end, its completion, and the bounded queue in which it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Literal, cast

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.sequence import Ending, Event, EventLog, replay
from spaceport.runtime.decode.sequence_group import GROUP_ENDINGS, Observer, SequenceGroup, Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import Score, Scoring, TokenLogprob
from spaceport.runtime.text.messages import estimated_tokens
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece, ThreadText, Transcript
from spaceport.runtime.trace.trace import Trace

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
        self.index: int | None = None  # index of its KV buffers in the engine; None: it still waits
        # a running request that computes the beginning of the prompt for both; None: it waits for none
        self.leader: Request | None = None
        self.common = 0  # number of prompt tokens for which it waits
        # Set by its reader only:
        self.patient = False  # waits for the whole completion, and need not be woken for each step
        self.unread_limit = UNREAD_LIMIT
        self._read = 0  # events or pieces
        self._delivered = 0  # events or pieces, counted by the scheduler
        self._unread: deque[list[Event] | list[Piece]] = deque()
        self._lock = Lock()  # of the decisions that it starts and ends; nothing else is called while it is held

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
    """The requests that wait, in the order in which they were prepared; any OS thread may use it."""

    def __init__(self, limit: int, most_tokens: int | None = None) -> None:
        self.limit = limit  # requests beyond those that get KV buffers at once
        self._most_tokens = most_tokens  # prompt tokens of all waiting requests; None: any number
        self._prepared: deque[Request] = deque()
        self._preparing: set[Request] = set()  # those that are tokenized, or wait for that
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of requests that wait, those that are being prepared included."""
        with self._lock:
            return self._count()

    @property
    def ready(self) -> bool:
        """Whether a prepared request waits."""
        return bool(self._prepared)

    def enter(self, request: Request, free: int) -> None:
        """Count a request that will be prepared; `free` others get KV buffers at once."""
        with self._lock:
            self._check(request, free)
            self._preparing.add(request)

    def leave(self, request: Request) -> None:
        """Count a request no longer that was not prepared."""
        with self._lock:
            self._preparing.discard(request)

    def put(self, request: Request, sequences: SequenceGroup, free: int) -> None:
        """Add a prepared request, unless it has ended."""
        with self._lock:
            if request in self._preparing:
                self._preparing.remove(request)
                self._check_tokens(sequences.statistics.prompt_tokens, free)
            else:
                self._check(request, free)
            if request.start(sequences):
                self._prepared.append(request)

    def take(self) -> Request | None:
        """The request that has waited longest."""
        with self._lock:
            return self._prepared.popleft() if self._prepared else None

    def take_all(self) -> list[Request]:
        """All prepared requests that wait."""
        with self._lock:
            prepared, self._prepared = self._prepared, deque()
        return list(prepared)

    def preparing(self) -> list[Request]:
        """The requests that are being prepared."""
        with self._lock:
            return list(self._preparing)

    def remove_done(self) -> None:
        """Remove the requests that have ended."""
        with self._lock:
            self._prepared = deque(request for request in self._prepared if not request.done)

    def __iter__(self) -> Iterator[Request]:
        """The prepared requests that wait."""
        with self._lock:
            return iter(list(self._prepared))

    def _count(self) -> int:
        # what has ended before its preparation began does not count
        self._preparing = {request for request in self._preparing if request.begun or not request.done}
        return len(self._prepared) + len(self._preparing)

    def _check(self, request: Request, free: int) -> None:
        waiting = self._count()
        if waiting >= self.limit + free:
            raise QueueFull(
                f"{waiting - free} requests wait already, queue_limit is {self.limit}: try again later, or "
                "raise queue_limit or max_requests"
            )
        self._check_tokens(request.tokens, free)

    def _check_tokens(self, tokens: int, free: int) -> None:
        """Raise `QueueFull` if all waiting requests have too many prompt tokens; a single one may have any number."""
        if self._most_tokens is None or self._count() <= free:
            return
        count = tokens + sum(request.tokens for request in (*self._prepared, *self._preparing))
        if count > self._most_tokens:
            raise QueueFull(
                f"the requests that wait have {count} prompt tokens, queued_prompt_tokens is {self._most_tokens}: try again "
                "later, or raise it in Limits"
            )
