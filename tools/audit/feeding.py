"""Feeding: tokens that are known, fed to an engine so many rows at a time, for the logits behind each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.manifest import TokenIds
from spaceport.runtime.accept import Verdict
from spaceport.runtime.draft import Drafting, Guess
from spaceport.runtime.engine import Engine
from spaceport.runtime.loop import step
from spaceport.runtime.plan import Plan
from spaceport.runtime.request import Request
from spaceport.runtime.scheduler import PROMPT_ROWS
from spaceport.runtime.slots import Slots
from spaceport.runtime.threads import Thread, new_thread
from spaceport.tools.audit.lines import Line

Logits = NDArray[np.float32]
# Hears which of the lines it is, a place of it, and the logits for the token there; they hold until it returns.
Hear = Callable[[int, int, Logits], None]


@dataclass(frozen=True)
class Pace:
    """How lines are fed."""

    rows: int = 1  # of the text in a step
    requests: int = 1  # lines side by side
    parts: int | None = None  # rows of the prompt in a step; none: as a runtime feeds it, which is alone

    def prompt_rows(self, start: int) -> int:
        """Rows of a prompt of so many tokens in a step; it is cut once at least, if it is to be cut."""
        return PROMPT_ROWS if self.parts is None else min(self.parts, max(1, -(-start // 2)))


PLAIN = Pace()


def feed(engine: Engine, lines: Sequence[Line], pace: Pace, hear: Hear) -> None:
    """Feed lines side by side from their beginnings; every place from each line's start on is heard, and one behind it."""
    hearers = [_Hearer(index, hear) for index in range(len(lines))]
    requests = [_request(engine, line, hearer) for line, hearer in zip(lines, hearers, strict=True)]
    while live := [request for request in requests if request.live]:
        for request in live:
            start, fed = lines[request.index].start, request.threads[0].fed
            rows = pace.rows if fed >= start else min(pace.prompt_rows(start), start - fed)
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


class _Hearer:
    """Passes on the logits of a line's own places."""

    def __init__(self, index: int, hear: Hear) -> None:
        self.index = index
        self.spoilt = False  # whether some of the logits were no numbers: then the buffers hold such too
        self._hear = hear

    def saw(self, request: Request, plan: Plan, verdicts: Sequence[Verdict], lines: Sequence[Logits]) -> None:
        (part,), (own,) = plan.parts, lines
        for row, logits in zip(part.rows_wanted.tolist(), own, strict=True):
            self._hear(self.index, int(part.positions[row]) + 1, logits)
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
