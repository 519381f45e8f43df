"""Feeding: tokens that are known, fed to an engine N rows at a time, for the logits behind each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Drafting, Guess
from spaceport.runtime.decode.request import Observer, Request, RequestConfig, VerifiedStep
from spaceport.runtime.decode.step import PREFILL_ROWS, StepInput, step
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import Engine
from spaceport.tools.verify.thread_tokens import ThreadTokens

_GAPS = 48  # slots; fewer than the rows of a step that every request has room for

Logits = NDArray[np.float32]
# Called with the index of a line, an index of its tokens, and the logits for the token there; valid until it returns.
OnLogits = Callable[[int, int, Logits], None]


@dataclass(frozen=True)
class Pace:
    """How lines are fed."""

    rows: int = 1  # of the text in a step
    requests: int = 1  # lines side by side
    parts: int | None = None  # rows of the prompt in a step; none: as plain decoding feeds it, whole and alone
    gaps: bool = False  # between the slots of rows, as draft trees leave them

    def first(self, line: ThreadTokens) -> int:
        """The first row of steps of this width: they end with the line, so a short text's begin within its prompt."""
        if self.parts is None:
            return line.start
        steps = min(-(-(len(line.tokens) - line.start + 1) // self.rows), len(line.tokens) // self.rows)
        return len(line.tokens) - steps * self.rows

    def least(self, line: ThreadTokens) -> int:
        """The first place whose logits come from a step of this width."""
        return max(line.start, self.first(line) + (self.parts is not None))

    def before(self, first: int) -> int:
        """Rows of a step before `first` rows have been fed; a prompt that is cut is cut once at least."""
        return PREFILL_ROWS if self.parts is None else min(self.parts, max(1, -(-first // 2)))


PLAIN = Pace()


class KnownTokens:
    """A token selector for texts that are fed and not written: whatever it chooses is of no use."""

    def token(self, logits: Logits, thread: Thread, ahead: Sequence[int]) -> int:
        return 0

    def guesses(self, logits: Logits, thread: Thread, place: int, most: int) -> tuple[Guess, ...]:
        return ()


class EchoObserver:
    """Passes on the logits of a line's tokens from one of them on."""

    def __init__(self, index: int, least: int, on_logits: OnLogits) -> None:
        self.index = index
        self.spoilt = False  # whether some of the logits were NaN: then the KV buffers hold NaN too
        self._least, self._on_logits = least, on_logits

    def on_step(self, verified: VerifiedStep) -> None:
        (part,), (own,) = verified.plan.parts, verified.logits
        for row, logits in zip(part.rows_wanted.tolist(), own, strict=True):
            place = int(part.positions[row]) + 1
            if place >= self._least:
                self._on_logits(self.index, place, logits)
            self.spoilt |= bool(np.isnan(logits).any())


def known_request(
    engine: Engine, tokens: Sequence[int], start: int, observer: Observer, stays: bool = False
) -> Request:
    """A request that feeds these tokens and is then over, or `stays` with its KV slots held.

    The observer gets the logits for each token from `start` on, and for one behind the last. A request that stays has one
    token more than it was given, the one that KnownTokens chooses behind the text, and would go on behind that.
    """
    config = RequestConfig(
        tokens=TokenIds(),
        selector=KnownTokens(),
        max_length=len(tokens) + (2 if stays else 0),
        max_total=2 if stays else 0,
        drafting=Drafting(0, "chain"),
        echo=start - 1,
    )
    return Request(tokens, config, engine.capacity, engine.signature.lowering, observers=(observer,))


def prefill(engine: Engine, request: Request, rows: int) -> None:
    """Feed a request's prompt, alone on the engine, at most `rows` rows in a call."""
    while request.prefilling:
        step(engine, [StepInput(request, 0, min(rows, engine.rows))])


def feed(engine: Engine, lines: Sequence[ThreadTokens], pace: Pace, on_logits: OnLogits) -> None:
    """Feed lines side by side from their first tokens; logits are passed on from each line's start on, and one behind it.

    Those of rows that were fed in narrower steps are not.
    """
    firsts = [pace.first(line) for line in lines]
    observers = [EchoObserver(index, pace.least(line), on_logits) for index, line in enumerate(lines)]
    requests = [
        known_request(engine, line.tokens, line.start, observer)
        for line, observer in zip(lines, observers, strict=True)
    ]
    gaps = [_Gaps(request, index) for index, request in enumerate(requests)] if pace.gaps else []
    while live := [(index, request) for index, request in enumerate(requests) if request.live]:
        for gap in gaps:
            gap.close_one()
        inputs = []
        for index, request in live:
            first, fed = firsts[index], request.threads[0].fed
            rows = pace.rows if fed >= first else min(pace.before(first), first - fed)
            inputs.append(StepInput(request, index, min(rows, engine.rows)))
        step(engine, inputs)
    for observer in observers:
        if observer.spoilt:
            engine.clear(observer.index)


def logits_of(engine: Engine, line: ThreadTokens) -> Logits:
    """The logits for every place from a line's start on and for one behind it, as plain decoding has them."""
    found = np.empty((len(line.tokens) - line.start + 1, engine.signature.vocab_size), np.float32)

    def note(_: int, place: int, logits: Logits) -> None:
        found[place - line.start] = logits

    feed(engine, [line], PLAIN, note)
    return found


class _Gaps:
    """Slots that no row sees, some of them released in each step: so rows stand with gaps, and in no order.

    That is how draft trees leave them, and the slots of a row decide in which order its sums are taken.
    """

    def __init__(self, request: Request, seed: int) -> None:
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
