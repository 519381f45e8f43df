"""Feeding: tokens that are known, fed to an engine so many rows at a time, for the logits behind each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.draft import Drafting, Guess
from spaceport.runtime.decode.plan import Plan
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.step import step
from spaceport.runtime.decode.threads import Thread, new_thread
from spaceport.runtime.engine import Engine
from spaceport.runtime.scheduling.scheduler import PROMPT_ROWS
from spaceport.tools.verify.lines import Line

_GAPS = 48  # slots; fewer than the rows of a step that every request has room for

Logits = NDArray[np.float32]
# Hears which of the lines it is, a place of it, and the logits for the token there; they hold until it returns.
Hear = Callable[[int, int, Logits], None]


@dataclass(frozen=True)
class Pace:
    """How lines are fed."""

    rows: int = 1  # of the text in a step
    requests: int = 1  # lines side by side
    parts: int | None = None  # rows of the prompt in a step; none: as plain decoding feeds it, whole and alone

    def first(self, line: Line) -> int:
        """The first row of steps of this width: they end with the line, so a short text's begin within its prompt."""
        if self.parts is None:
            return line.start
        steps = min(-(-(len(line.tokens) - line.start + 1) // self.rows), len(line.tokens) // self.rows)
        return len(line.tokens) - steps * self.rows

    def least(self, line: Line) -> int:
        """The first place whose logits come from a step of this width."""
        return max(line.start, self.first(line) + (self.parts is not None))

    def before(self, first: int) -> int:
        """Rows of a step before so many have been fed; what is cut is cut once at least."""
        return PROMPT_ROWS if self.parts is None else min(self.parts, max(1, -(-first // 2)))


PLAIN = Pace()


def feed(engine: Engine, lines: Sequence[Line], pace: Pace, hear: Hear) -> None:
    """Feed lines side by side from their beginnings; places from each line's start on are heard, and one behind it.

    Those of rows that were fed in narrower steps are not.
    """
    firsts = [pace.first(line) for line in lines]
    hearers = [_Hearer(index, pace.least(line), hear) for index, line in enumerate(lines)]
    requests = [_request(engine, line, hearer) for line, hearer in zip(lines, hearers, strict=True)]
    gaps = [] if pace.parts is None else [_Gaps(request) for request in requests]
    while live := [request for request in requests if request.live]:
        for gap in gaps:
            gap.close_one()
        for request in live:
            first, fed = firsts[request.index], request.threads[0].fed
            rows = pace.rows if fed >= first else min(pace.before(first), first - fed)
            request.chunk = min(rows, engine.rows)
        step(engine, live)
    for hearer in hearers:
        if hearer.spoilt:
            engine.clear(hearer.index)


def logits_of(engine: Engine, line: Line) -> Logits:
    """The logits for every place from a line's start on and for one behind it, as plain decoding has them."""
    found = np.empty((len(line.tokens) - line.start + 1, engine.signature.vocab_size), np.float32)

    def hear(_: int, place: int, logits: Logits) -> None:
        found[place - line.start] = logits

    feed(engine, [line], PLAIN, hear)
    return found


class _Gaps:
    """Slots that nobody sees, some of them given back in each step: so rows stand with gaps, and in no order.

    That is how drafts leave them, and where a row's slots stand decides in which order its sums are taken.
    """

    def __init__(self, request: Request) -> None:
        self._slots = request.slots
        held = request.slots.take(np.zeros(_GAPS, np.int64))
        self._held = np.random.default_rng(request.index).permutation(held)
        for _ in range(_GAPS // 2):
            self.close_one()

    def close_one(self) -> None:
        """Give one slot back."""
        if self._slots.held and self._held.size:
            self._slots.release(self._held[:1])
            self._held = self._held[1:]


class _Hearer:
    """Passes on the logits of a line's own places."""

    def __init__(self, index: int, least: int, hear: Hear) -> None:
        self.index = index
        self.spoilt = False  # whether some of the logits were no numbers: then the buffers hold such too
        self._least, self._hear = least, hear

    def saw(self, request: Request, plan: Plan, verdicts: Sequence[Verdict], lines: Sequence[Logits]) -> None:
        (part,), (own,) = plan.parts, lines
        for row, logits in zip(part.rows_wanted.tolist(), own, strict=True):
            place = int(part.positions[row]) + 1
            if place >= self._least:
                self._hear(self.index, place, logits)
            self.spoilt |= bool(np.isnan(logits).any())


class _Silent:
    """Chooses nothing: what is fed is known."""

    def token(self, logits: Logits, thread: Thread, ahead: Sequence[int]) -> int:
        return 0

    def guesses(self, logits: Logits, thread: Thread, place: int, most: int) -> tuple[Guess, ...]:
        return ()


def _request(engine: Engine, line: Line, hearer: _Hearer) -> Request:
    return Request(
        index=hearer.index,
        slots=Slots(engine.capacity, engine.signature.lowering),
        threads=[new_thread(line.tokens, engine.capacity)],
        tokens=TokenIds(),
        choose=_Silent(),
        limit=len(line.tokens),
        total=0,
        drafting=Drafting(0, "chain"),
        observers=(hearer,),
        echo=line.start - 1,
    )
