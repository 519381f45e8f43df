"""Generation: a request that generates a completion, and one that scores given text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from spaceport.runtime.decode.events import Event, EventLog, replay
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.sampling.logprobs import Scoring, TokenLogprob
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.text.transcript import Piece, ThreadText, Transcript
from spaceport.runtime.trace.trace import Trace

_PATIENCE = 32  # events after which a patient reader is woken: it processes them within a step
UNREAD_LIMIT = 4096  # tokens
_REQUEST_WIDE: tuple[Ending, ...] = ("cancelled", "deadline", "total")

# What a step added to a completion: pieces, or the events that the reader turns into pieces.
Delivery = list[Piece] | list[Event]

# Receives what each step added, and None at the end; called from the worker thread or from the thread that closes the
# runtime.
Deliver = Callable[[Delivery | None], None]


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


@dataclass(eq=False, kw_only=True)
class Generation(Task):
    """A request that generates a completion, with its text so far.

    Without stop strings, the reader's thread turns `events` into text while the engine runs. With stop strings there are
    no `events`: the transcript listens to the request itself.
    """

    transcript: Transcript
    events: EventLog | None
    deliver: Deliver
    seed: int | None  # None: greedy decoding
    trace: Trace | None

    unread_limit: int = UNREAD_LIMIT  # events or pieces that are generated but not read
    delivered: int = 0  # events or pieces, counted by the worker
    consumed: int = 0  # counted by the reader
    patient: bool = False  # set by a reader that waits for the whole completion and need not be woken for each step
    text_fault: Exception | None = None  # error while events were turned into text

    @property
    def paused(self) -> bool:
        """Whether too much of it is unread; it keeps its KV slots, and can be cancelled or reach its deadline."""
        return self.delivered - self.consumed >= self.unread_limit

    def on_progress(self) -> None:
        if self.patient and not self.done and self.events is not None and self.events.count < _PATIENCE:
            return
        delivery = self.transcript.take() if self.events is None else self.events.take()
        if delivery:
            self.delivered += len(delivery)
            self.deliver(delivery)
        if self.done:
            self.deliver(None)

    def read(self, delivery: Delivery) -> list[Piece]:
        """The pieces of a delivery; the reader calls it once for each delivery, in order."""
        self.consumed += len(delivery)
        if self.events is None:
            return cast(list[Piece], delivery)
        try:
            replay(cast(list[Event], delivery), self.transcript)
            return self.transcript.take()
        except Exception as error:
            self.text_fault, self.cancelled = error, True
            raise

    def completion(self) -> Completion:
        """The completion, after all deliveries were read; raises the error of a failed request."""
        if (fault := self.fault or self.text_fault) is not None:
            raise fault
        root = self.request.threads[0]
        threads = self.transcript.finished()
        wide = next((thread.ending for thread in threads if thread.ending in _REQUEST_WIDE), None)
        return Completion(
            self.transcript.text,
            self.transcript.tokens(),
            wide or threads[0].ending,
            self.request.statistics,
            tuple(root.tokens[: root.start]),
            threads,
            self.transcript.logprobs(),
            self.seed,
            self.trace,
        )


def not_submitted(ending: Ending) -> Completion:
    """The completion of a request that ended before it was tokenized."""
    return Completion("", (), ending, Statistics(), threads=(ThreadText((), None, "", (), ending),))


def _fed() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # so that waiting callers cannot cancel it
    return future


@dataclass(eq=False, kw_only=True)
class ScoringTask(Task):
    """A request that scores given text."""

    scoring: Scoring
    fed: Future[None] = field(default_factory=_fed)  # done when the whole text was fed

    def on_progress(self) -> None:
        if not self.done or self.fed.done():
            return
        if self.fault is not None:
            self.fed.set_exception(self.fault)
        else:
            self.fed.set_result(None)
