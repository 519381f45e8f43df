"""Predictions: what a model and its mask slots predict behind every place of a line that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import PLAIN
from spaceport.runtime.decode.pack import pack, split
from spaceport.runtime.decode.plan import Part, Plan, lay_out
from spaceport.runtime.decode.request import Request, ScheduledStep
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import Engine
from spaceport.tools.verify.acceptance.answers import greedy_for
from spaceport.tools.verify.acceptance.given import Passage
from spaceport.tools.verify.feeding import EchoObserver, known_request, prefill

ROWS = 128  # of one call: enough to keep the matrix products full, few enough that their logits stay small
NOTHING = -1


def predict_line(engine: Engine, tokens: TokenIds, passage: Passage, mask_slots: int) -> NDArray[np.int64]:
    """The greedy predictions along an answer, its places x (1 + mask slots).

    Entry (s, i) is what slot i says of the token at place s + i of the answer, from what stands before place s alone.
    Slot 0 is the row of the token before place s; mask slot i stands in place s + i - 1. Beyond the answer: NOTHING.
    """
    line = [*passage.prompt, *passage.tokens]
    start, path = len(passage.prompt), (0,) if passage.child else ()
    selector = greedy_for(tokens)
    found = np.full((len(passage.tokens), 1 + mask_slots), NOTHING, np.int64)

    def note(_: int, place: int, logits: NDArray[np.float32]) -> None:
        before = Thread(path, line[:place], start, np.zeros(engine.capacity, np.bool_), fed=place)
        found[place - start, 0] = selector.token(logits, before, ())

    request = known_request(engine, line[:-1], start, EchoObserver(0, start, note), stays=True)
    prefill(engine, request, ROWS)
    if not mask_slots:
        return found
    masks = _MaskGroups(engine, request, tokens, selector, line, start, path)
    groups = max(1, masks.free_rows // mask_slots)  # of one call
    last = len(passage.tokens) - 1  # nothing is left to predict for the masks behind the token before it
    for first in range(0, last, groups):
        masks.predict(range(first, min(first + groups, last)), found)
    return found


@dataclass(frozen=True)
class _MaskGroups:
    """Groups of mask slots behind the tokens of a line that is in the KV cache."""

    engine: Engine
    request: Request
    tokens: TokenIds
    selector: TokenSelector
    line: Sequence[int]
    start: int  # place of the first predicted token
    path: tuple[int, ...]  # of the thread that would write the line

    @property
    def free_rows(self) -> int:
        """Rows that a call may have behind what is held."""
        return min(ROWS, self.engine.rows, self.request.slots.spare - self.request.slots.height)

    def predict(self, places: range, found: NDArray[np.int64]) -> None:
        """Note what the masks predict that begin at these places of the answer; their slots are free again after it."""
        depth = found.shape[1] - 1
        plan = Plan(tuple(self._group(self.start + place, depth) for place in places))
        slots = self.request.slots.take(plan.positions)
        logits = self.engine.run(pack(self.engine, [ScheduledStep(self.request, 0, plan, slots)]))[0]
        self.request.slots.release(slots)
        for place, part, own in zip(places, plan.parts, split(plan, logits), strict=True):
            guesses = self.selector.guesses(own, part.thread, self.start + place + 1, 1)
            found[place, 1 : 1 + len(guesses)] = [guess.tokens[0] for guess in guesses]

    def _group(self, place: int, depth: int) -> Part:
        """The mask slots that begin in a place, which see the line before it; none beyond the line's end."""
        depth = min(depth, len(self.line) - 1 - place)
        shape = lay_out(0, PLAIN.parents, (depth,))
        layout = replace(shape, wanted=np.arange(depth))
        masks = self.tokens.mask
        ids = np.array(masks[:depth] if len(masks) > 1 else masks * depth, np.int64)
        return Part(self._before(place), PLAIN, layout, ids, layout.offsets + place, complete=True)

    def _before(self, place: int) -> Thread:
        """The thread as it is when it comes to a place."""
        (root,) = self.request.threads
        sees = root.sees & (self.request.slots.positions < place)
        return Thread(self.path, list(self.line[:place]), self.start, sees, fed=place)
