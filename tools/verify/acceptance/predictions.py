"""Reading: what a model and its mask slots predict behind every place of a line that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import PLAIN, Drafting
from spaceport.runtime.decode.plan import Part, Plan, lay_out, plan_thread
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import Engine, pack, split
from spaceport.tools.verify.acceptance.answers import request_for
from spaceport.tools.verify.acceptance.given import Passage

ROWS = 128  # of one call: enough to keep the matrix products full, few enough that their logits stay small
NOTHING = -1


def read_line(engine: Engine, tokens: TokenIds, passage: Passage, mask_slots: int) -> NDArray[np.int64]:
    """The greedy predictions along an answer, its places x (1 + mask slots).

    Entry (s, i) is what slot i says of the token at place s + i of the answer, from what stands before place s alone.
    Slot 0 is the row of the token before place s; mask slot i stands in place s + i - 1. Beyond the answer: NOTHING.
    """
    line = [*passage.prompt, *passage.tokens]
    request = request_for(engine, tokens, line[:-1], len(line), Drafting(mask_slots, "chain"))
    reading = _Reading(engine, request, line, len(passage.prompt), (0,) if passage.child else ())
    found = np.full((len(passage.tokens), 1 + mask_slots), NOTHING, np.int64)
    found[:, 0] = reading.feed()
    if not mask_slots:
        return found
    groups = max(1, reading.room // mask_slots)  # of one call
    last = len(passage.tokens) - 1  # nothing is left to predict for the masks behind the token before it
    for first in range(0, last, groups):
        reading.draft(range(first, min(first + groups, last)), found)
    return found


@dataclass
class _Reading:
    """A line under way."""

    engine: Engine
    request: Request
    line: Sequence[int]
    start: int  # place of the first predicted token
    path: tuple[int, ...]  # of the thread that would write the line

    def __post_init__(self) -> None:
        self.slots = np.empty(0, np.int64)  # of each token that was fed

    @property
    def room(self) -> int:
        """Rows that a call may have behind what is held."""
        return min(ROWS, self.engine.rows, self.request.slots.spare - self.request.slots.height)

    def feed(self) -> NDArray[np.int64]:
        """Feed all tokens but the last; the prediction for each place from the start on."""
        found: list[int] = []
        (thread,) = self.request.threads
        while thread.fed < len(thread.tokens):
            rows = min(ROWS, self.engine.rows)
            part = plan_thread(thread, PLAIN, self.request.tokens, rows, echo=self.start - 1)
            slots, (logits,) = self._run(Plan((part,)))
            thread.sees[slots] = True
            thread.fed += slots.size
            self.slots = np.concatenate((self.slots, slots))
            for line, place in zip(logits, part.positions[part.rows_wanted].tolist(), strict=True):
                found.append(self.request.choose.token(line, self._before(place + 1), ()))
        return np.array(found, np.int64)

    def draft(self, places: range, found: NDArray[np.int64]) -> None:
        """Note what the masks predict that begin at these places of the answer; their slots are free again after it."""
        depth = found.shape[1] - 1
        plan = Plan(tuple(self._group(self.start + place, depth) for place in places))
        slots, lines = self._run(plan)
        self.request.slots.release(slots)
        for place, part, logits in zip(places, plan.parts, lines, strict=True):
            guesses = self.request.choose.guesses(logits, part.thread, self.start + place + 1, 1)
            found[place, 1 : 1 + len(guesses)] = [guess.tokens[0] for guess in guesses]

    def _before(self, place: int) -> Thread:
        """The thread as it is when it comes to a place."""
        sees = np.zeros(self.engine.capacity, np.bool_)
        sees[self.slots[:place]] = True
        return Thread(self.path, list(self.line[:place]), self.start, sees, fed=place)

    def _group(self, place: int, depth: int) -> Part:
        """The mask slots that begin in a place, which see the line before it; none beyond the line's end."""
        depth = min(depth, len(self.line) - 1 - place)
        shape = lay_out(0, PLAIN.parents, (depth,))
        layout = replace(shape, wanted=np.arange(depth))
        masks = self.request.tokens.mask
        ids = np.array(masks[:depth] if len(masks) > 1 else masks * depth, np.int64)
        return Part(self._before(place), PLAIN, layout, ids, layout.offsets + place, complete=True)

    def _run(self, plan: Plan) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
        """The slots that the rows were written to, and the logits of each part."""
        slots = self.request.slots.take(plan.positions)
        logits = self.engine.run(pack(self.engine, [self.request], [plan], [slots]))[0]
        return slots, split(plan, logits)
