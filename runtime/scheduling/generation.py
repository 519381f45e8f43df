"""Generation: a request whose text somebody reads, and one that only scores a given text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from spaceport.runtime.decode.events import Event, EventLog, replay
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.scoring import Scoring
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.text.piece import Piece, ThreadText
from spaceport.runtime.text.transcript import Transcript
from spaceport.runtime.trace.trace import Trace

_PATIENCE = 32  # events that a patient reader is woken for: its work on them fits into a step
_REQUEST_WIDE: tuple[Ending, ...] = ("cancelled", "deadline", "total")

# What a step added to a text: its pieces, or the events that the reader makes them of.
Delivery = list[Piece] | list[Event]

# Takes what each step added, and None when there will be no more; called from the worker's OS thread or from the one that
# closes the runtime.
Deliver = Callable[[Delivery | None], None]


@dataclass(frozen=True)
class Completion:
    """A finished completion.

    - `text`: The generated text, with the text of each thread in the place of its `[Fork]`.
    - `tokens`: The generated token ids, in the same order.
    - `ending`: Why generation ended: "total", "deadline" or "cancelled" if that ended any thread, else the ending of the
      root thread.
    - `statistics`: Counts and times of the request.
    - `prompt_tokens`: Token ids of the prompt.
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
    """A request that writes a text, with the text so far.

    Without stop strings the text decides nothing, so it is made where it is read, while the engine runs: `events` holds
    what the transcript has not seen. With stop strings there are no `events`: the transcript listens to the request.
    """

    transcript: Transcript
    events: EventLog | None
    deliver: Deliver
    seed: int | None  # None: nothing is sampled
    trace: Trace | None

    patient: bool = False  # set by a reader that waits for the whole text: it need not wake up for each step
    text_fault: Exception | None = None  # why its text could not be read

    def on_progress(self) -> None:
        if self.patient and not self.done and self.events is not None and self.events.count < _PATIENCE:
            return
        delivery = self.transcript.take() if self.events is None else self.events.take()
        if delivery:
            self.deliver(delivery)
        if self.done:
            self.deliver(None)

    def read(self, delivery: Delivery) -> list[Piece]:
        """The pieces of a delivery; called by the reader, once for each delivery and in their order."""
        if self.events is None:
            return cast(list[Piece], delivery)
        try:
            replay(cast(list[Event], delivery), self.transcript)
            return self.transcript.take()
        except Exception as error:
            self.text_fault, self.cancelled = error, True
            raise

    def completion(self) -> Completion:
        """The finished text, once all deliveries were read; raises the error that the request failed with."""
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


def _fed() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
    return future


@dataclass(eq=False, kw_only=True)
class ScoringTask(Task):
    """A request that writes nothing, with the log-probabilities of its tokens so far."""

    scoring: Scoring
    fed: Future[None] = field(default_factory=_fed)  # done when the whole text has been fed

    def on_progress(self) -> None:
        if not self.done or self.fed.done():
            return
        if self.fault is not None:
            self.fed.set_exception(self.fault)
        else:
            self.fed.set_result(None)
