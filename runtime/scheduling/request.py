"""A request from its submission to its end, and its completion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Any, Literal, cast

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
        self.decoding = decoding
        self.tenant = decoding.tenant  # on whose behalf it runs: tenants take turns
        self.echo = echo
        self.observers = observers
        self.deadline = deadline  # seconds of the scheduler's clock
        self.number = next(_numbers)  # of the process, for log entries
        self.submitted = perf_counter()
        # Changed by the methods below only, from any OS thread:
        self.prompt: Prompt | None = prompt  # until it is prepared, or has ended
        self.begun = False  # whether its preparation has begun
        self.tokens = estimated_tokens(prompt if echo is None else (prompt, echo.continuation))  # of the prompt
        self.sequences: SequenceGroup  # once it is prepared
        self.prepared = False  # whether it has been in the queue of the scheduler, with its sequences
        self.asked: Outcome | None = None  # how it shall end after the current step
        self.outcome: Outcome | None = None  # once it is done
        self._end_counted = False
        self._lock = Lock()  # of the decisions that it starts and ends; nothing else is called while it is held
        # Set by its preparation only:
        self.output: Output | Scoring | None = None
        # Set by the scheduler only:
        self.index: int | None = None  # index of its KV buffers in the engine; None: it waits
        self.parked: Any = None  # its KV rows, while others have the buffers that it had
        # a running request that computes the beginning of the prompt for both; None: it waits for none
        self.leader: Request | None = None
        self.common = 0  # number of prompt tokens for which it waits
        self.failure: BaseException | None = None  # why it fails, whatever its reader asks meanwhile
        self._delivered = 0  # events or pieces
        # Set by the queue only:
        self.admitted = 0  # number of the round in which it got its KV buffers
        self.stepped = 0  # number of its last step in rounds in which tenants took turns
        # Set by its reader only:
        self.on_change: Callable[[], None] = _ignore  # called after each step, and when its state changes
        self.patient = False  # waits for the whole completion, and need not be woken for each step
        self.unread_limit = UNREAD_LIMIT
        self._read = 0  # events or pieces
        self._unread: deque[list[Event] | list[Piece]] = deque()  # from the scheduler to the reader

    @property
    def state(self) -> State:
        """Where it is between its submission and its end."""
        if self.outcome is not None:
            return "done"
        if not self.prepared or self.index is None:
            return "waiting"
        return "prefill" if self.sequences.prefilling else "decoding"

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
        return self.sequences.statistics if self.prepared else Statistics()

    @property
    def paused(self) -> bool:
        """Whether too much of it is unread; it keeps its KV slots, and can be cancelled or reach its deadline."""
        return self._delivered - self._read >= self.unread_limit

    def begin(self) -> bool:
        """Begin to prepare it, which takes its prompt; returns whether it has not ended."""
        with self._lock:
            self.begun, self.prompt = True, None
            return self.outcome is None and self.asked is None

    def start(self, sequences: SequenceGroup) -> bool:
        """Give it to the scheduler; returns whether it has not ended meanwhile."""
        with self._lock:
            if self.outcome is None and self.asked is None:
                self.sequences, self.prepared = sequences, True
                self.tokens = sequences.statistics.prompt_tokens
            return self.prepared

    def end(self, outcome: Outcome = "cancelled") -> None:
        """End it: at once if the scheduler does not have it, else with its current step."""
        with self._lock:
            if self.asked is None:
                self.asked = outcome
            if self.outcome is not None or self.prepared:
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

    def drop(self) -> None:
        """Ask for its end without a lock, since nobody reads it any more."""
        if self.asked is None:
            self.asked = "cancelled"

    def mark_counted(self) -> bool:
        """Note that its end is counted; returns whether it was not before."""
        with self._lock:
            counted, self._end_counted = self._end_counted, True
        return not counted

    def changed(self) -> None:
        """Tell its reader; an error of one reader, such as a closed event loop, affects no other request."""
        try:
            self._tell()
        except Exception:  # noqa: BLE001  (nobody else can use it)
            self.drop()

    def report(self, outcome: Outcome | None = None) -> None:
        """Pass on what the current step has added, and the outcome if it was the last step; raises the reader's error."""
        output = self.output
        if isinstance(output, Output):
            log = output.events
            if log is not None and outcome is None and self.patient and len(log.events) < _PATIENCE:
                return
            delivery: list[Event] | list[Piece] = output.transcript.take() if log is None else log.events
            if log is not None:
                log.events = []
            if delivery:
                self._delivered += len(delivery)
                self._unread.append(delivery)
            elif outcome is None:
                return
        if outcome is None:
            self.on_change()
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

    def completion(self, with_logprobs: bool = True) -> Completion:
        """The completion, after all pieces were read; raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        if not self.prepared:
            ending = cast("Ending", self.outcome)
            return Completion("", (), ending, Statistics(), threads=(ThreadText((), None, "", (), ending),))
        assert isinstance(self.output, Output)
        root, transcript = self.sequences.threads[0], self.output.transcript
        # without those that ended behind a stop string, whatever ended them
        threads = transcript.finished(with_logprobs)
        return Completion(
            transcript.text,
            transcript.tokens(),
            next((thread.ending for thread in threads if thread.ending in GROUP_ENDINGS), threads[0].ending),
            self.sequences.statistics,
            tuple(root.tokens[: root.start]),
            threads,
            transcript.logprobs(threads),
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
