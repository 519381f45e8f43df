"""Feeding: the logits of an engine for known token sequences, fed N rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.comparison import ThreadTokens
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import TokenSequence
from spaceport.runtime.decode.sequence_group import Observer, SequenceGroup, VerifiedStep
from spaceport.runtime.decode.step import StepInput, step
from spaceport.runtime.engine import PREFILL_ROWS, Engine

_GAPS = 48  # slots; fewer than the free slots that every request has for a step's rows

Logits = NDArray[np.float32]
# Called with the index of a sequence, a position in it, and the logits for the token there; valid until it returns.
OnLogits = Callable[[int, int, Logits], None]


@dataclass(frozen=True)
class FeedPlan:
    """How sequences are fed to an engine."""

    rows: int = 1  # rows of a sequence per step
    requests: int = 1  # sequences in one engine call
    prefill_chunk: int | None = None  # prompt rows per step; None: as plain decoding prefills, alone in the call
    gaps: bool = False  # leave gaps between KV slots, as draft trees do

    def first(self, thread: ThreadTokens) -> int:
        """Position of the first token in steps of this width.

        These steps end with the sequence, so those of a short sequence begin within its prompt.
        """
        if self.prefill_chunk is None:
            return thread.start
        steps = min(-(-(len(thread.tokens) - thread.start + 1) // self.rows), len(thread.tokens) // self.rows)
        return len(thread.tokens) - steps * self.rows

    def first_scored(self, thread: ThreadTokens) -> int:
        """The first position whose logits come from a step of this width."""
        return max(thread.start, self.first(thread) + (self.prefill_chunk is not None))

    def prefill_rows(self, first: int) -> int:
        """Rows per step for the tokens before position `first`; a chunked prefill has at least two chunks."""
        return PREFILL_ROWS if self.prefill_chunk is None else min(self.prefill_chunk, max(1, -(-first // 2)))


PLAIN = FeedPlan()


class KnownTokens:
    """A token selector for sequences that are fed, not generated: its choices are not used."""

    def token(self, logits: Logits, thread: TokenSequence, ahead: Sequence[int]) -> int:
        return 0

    def candidates(self, logits: Logits, thread: TokenSequence, position: int, most: int) -> tuple[Candidates, ...]:
        return ()


class EchoObserver:
    """Passes on the logits for a sequence's tokens from a position on."""

    def __init__(self, index: int, first: int, on_logits: OnLogits) -> None:
        self.index = index
        self.has_nan = False  # some logits were NaN, so the KV cache may hold NaN too
        self._first, self._on_logits = first, on_logits

    def on_step(self, verified: VerifiedStep) -> None:
        (part,), (own,) = verified.plan.parts, verified.logits
        for row, logits in zip(part.rows_wanted.tolist(), own, strict=True):
            position = int(part.positions[row]) + 1
            if position >= self._first:
                self._on_logits(self.index, position, logits)
            self.has_nan |= bool(np.isnan(logits).any())


def known_request(
    engine: Engine, tokens: Sequence[int], start: int, observer: Observer, stays: bool = False
) -> SequenceGroup:
    """A request that feeds these tokens and then ends, or `stays` live with its KV slots held.

    The observer gets the logits for each token from position `start` on, and for one after the last. A request that stays
    has one extra token: the one that KnownTokens selects after the last.
    """
    return SequenceGroup(
        prompt=tokens,
        capacity=engine.capacity,
        lowering=engine.signature.lowering,
        tokens=TokenIds(),
        selector=KnownTokens(),
        max_length=len(tokens) + (2 if stays else 0),
        max_total=2 if stays else 0,
        echo=start - 1,
        observers=(observer,),
    )


def prefill(engine: Engine, request: SequenceGroup, rows: int) -> None:
    """Feed a request's prompt, alone on the engine, at most `rows` rows in a call."""
    while request.prefilling:
        step(engine, [StepInput(request, 0, min(rows, engine.rows))])


def feed(engine: Engine, threads: Sequence[ThreadTokens], plan: FeedPlan, on_logits: OnLogits) -> None:
    """Feed sequences in shared engine calls, and pass on the logits from each one's `start` to one after its end.

    Logits of rows that were fed in narrower steps are left out.
    """
    firsts = [plan.first(thread) for thread in threads]
    observers = [EchoObserver(index, plan.first_scored(thread), on_logits) for index, thread in enumerate(threads)]
    requests = [
        known_request(engine, thread.tokens, thread.start, observer)
        for thread, observer in zip(threads, observers, strict=True)
    ]
    gaps = [_Gaps(request, index) for index, request in enumerate(requests)] if plan.gaps else []
    while live := [(index, request) for index, request in enumerate(requests) if request.live]:
        for gap in gaps:
            gap.close_one()
        inputs = []
        for index, request in live:
            first, fed = firsts[index], request.threads[0].fed
            rows = plan.rows if fed >= first else min(plan.prefill_rows(first), first - fed)
            inputs.append(StepInput(request, index, min(rows, engine.rows)))
        step(engine, inputs)
    for observer in observers:
        if observer.has_nan:
            engine.clear(observer.index)


def logits_of(engine: Engine, thread: ThreadTokens) -> Logits:
    """The logits of plain decoding for every position from a thread's start to one after its end."""
    found = np.empty((len(thread.tokens) - thread.start + 1, engine.signature.vocab_size), np.float32)

    def on_logits(_: int, position: int, logits: Logits) -> None:
        found[position - thread.start] = logits

    feed(engine, [thread], PLAIN, on_logits)
    return found


class _Gaps:
    """Reserved slots that no row sees, one released before each step, so that rows get slots with gaps and out of order.

    Draft trees leave slots like this, and the slots of a row decide the order of its floating-point sums.
    """

    def __init__(self, request: SequenceGroup, seed: int) -> None:
        self._slots = request.slots
        held = request.slots.take(np.zeros(_GAPS, np.int64))
        self._held = np.random.default_rng(seed).permutation(held)
        for _ in range(_GAPS // 2):
            self.close_one()

    def close_one(self) -> None:
        """Release one slot."""
        if self._slots.held and self._held.size:
            self._slots.release(self._held[:1])
            self._held = self._held[1:]
