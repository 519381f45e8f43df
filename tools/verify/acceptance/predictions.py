"""Predictions: the greedy predictions of the next token and of mask slots or heads at every token of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CAUSAL, CorrectionTables, MaskLayout
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import PLAIN, best_chain
from spaceport.runtime.decode.plan import Part, Plan, lay_out
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import Observer, ScheduledStep, SequenceGroup, VerifiedStep
from spaceport.runtime.decode.step import pack, split
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.choice import Corrected
from spaceport.tools.verify.acceptance.answers import greedy_selector
from spaceport.tools.verify.acceptance.reference_answers import AnswerSegment
from spaceport.tools.verify.feeding import EchoObserver, known_request, prefill

ROWS = 128  # rows per call: enough for efficient matrix products, few enough for small logits
NO_PREDICTION = -1


def predict_segment(
    engine: Engine,
    tokens: TokenIds,
    segment: AnswerSegment,
    mask_slots: int,
    mask_layout: MaskLayout = CAUSAL,
    max_seq_len: int = 0,
    correction: CorrectionTables | None = None,
) -> NDArray[np.int64]:
    """The greedy predictions along an answer: its tokens x (1 + mask slots); those of heads, if the engine has any.

    Entry (n, i) is what slot i predicts for token n + i of the answer, given only the tokens before token n. Slot 0 is the row
    of the token before; mask slot i has the position of token n + i - 1, or without shift of token n + i. Entries past the answer's end are NO_PREDICTION.
    A block is complete there too, up to position `max_seq_len`. With a draft correction, mask slot 1 predicts behind token n,
    and each other one behind the prediction of the one before.
    """
    sequence = [*segment.prefix, *segment.tokens]
    start, path = len(segment.prefix), (0,) if segment.child else ()
    selector = greedy_selector(tokens)
    predicted = np.full((len(segment.tokens), 1 + mask_slots), NO_PREDICTION, np.int64)

    def on_logits(_: int, position: int, logits: NDArray[np.float32]) -> None:
        before = TokenSequence(path, sequence[:position], start, np.zeros(engine.capacity, np.bool_), fed=position)
        predicted[position - start, 0] = selector.token(logits, before, ())

    observer: Observer = EchoObserver(0, start, on_logits)
    if engine.signature.lines > 1:
        observer = _HeadsObserver(observer, selector, sequence, start, path, predicted)
    request = known_request(engine, sequence[:-1], start, observer, stays=True)
    prefill(engine, request, ROWS)
    if not mask_slots or engine.signature.lines > 1:
        return predicted
    drafts = selector if correction is None else Corrected(selector, correction)
    masks = _MaskGroups(engine, request, tokens, mask_layout, drafts, sequence, start, path, max_seq_len)
    groups = max(1, masks.free_rows // mask_layout.rows(mask_slots))  # groups per call
    last = len(segment.tokens) - 1  # mask slots predict from the token after the next one: none is left at the last
    for first in range(0, last, groups):
        masks.predict(range(first, min(first + groups, last)), predicted)
    return predicted


@dataclass(frozen=True)
class _HeadsObserver:
    """Stores what the heads predict at each token of a sequence, and passes the steps on to another observer."""

    inner: Observer
    selector: TokenSelector
    sequence: Sequence[int]
    start: int  # position of the first predicted token
    path: tuple[int, ...]  # path of the thread that generates the sequence
    predicted: NDArray[np.int64]

    def on_step(self, verified: VerifiedStep) -> None:
        self.inner.on_step(verified)
        (part,), (lines,) = verified.plan.parts, verified.head_logits
        for row, heads in zip(part.rows_wanted.tolist(), lines, strict=True):
            position = int(part.positions[row]) + 1
            count = min(self.predicted.shape[1] - 1, len(self.sequence) - 1 - position)
            if position < self.start or count < 1:
                continue
            thread = TokenSequence(
                self.path, list(self.sequence[:position]), self.start, np.zeros(1, np.bool_), fed=position
            )
            found = self.selector.candidates(heads[:count], thread, position + 1, 1)
            self.predicted[position - self.start, 1 : 1 + count] = [candidate.tokens[0] for candidate in found]


@dataclass(frozen=True)
class _MaskGroups:
    """Groups of mask slots after the tokens of a sequence that is in the KV cache."""

    engine: Engine
    request: SequenceGroup
    tokens: TokenIds
    mask_layout: MaskLayout
    selector: TokenSelector
    sequence: Sequence[int]
    start: int  # position of the first predicted token
    path: tuple[int, ...]  # path of the thread that generates the sequence
    max_seq_len: int  # first position that no row may have

    @property
    def free_rows(self) -> int:
        """Rows that a call may have besides the cached tokens."""
        return min(ROWS, self.engine.rows, self.request.slots.spare - self.request.slots.height)

    def predict(self, indices: range, predicted: NDArray[np.int64]) -> None:
        """Store the predictions of the groups at these indices of the answer, and release their KV slots."""
        depth = predicted.shape[1] - 1
        plan = Plan(tuple(self._group(self.start + index, depth) for index in indices))
        slots = self.request.slots.take(plan.positions)
        logits = self.engine.run(pack(self.engine, [ScheduledStep(self.request, 0, plan, slots)]))[0]
        self.request.slots.release(slots)
        for index, part, own in zip(indices, plan.parts, split(plan, logits), strict=True):
            candidates = self.selector.candidates(own, part.thread, self.start + index + 1, 1)
            known = best_chain(candidates, self.sequence[self.start + index])[: self._known(self.start + index)]
            found = [candidate.tokens[0] for candidate in known]
            predicted[index, 1 : 1 + len(found)] = found

    def _group(self, position: int, depth: int) -> Part:
        """The mask rows from a position on, which see the sequence before it; of a block, also those past its end."""
        within = self.max_seq_len - position - self.mask_layout.lead if self.mask_layout.group == "block" else 0
        depth = min(depth, max(self._known(position), within))
        layout = lay_out(0, PLAIN.parents, (depth,), self.mask_layout)
        wanted = np.array(layout.groups[0], np.int64)
        masks = self.tokens.mask
        ids = np.array(masks[: layout.rows] if len(masks) > 1 else masks * layout.rows, np.int64)
        return Part(self._before(position), PLAIN, layout, ids, layout.offsets + position, wanted, complete=True)

    def _known(self, position: int) -> int:
        """The number of mask slots from a position on whose tokens the sequence has."""
        return len(self.sequence) - 1 - position

    def _before(self, position: int) -> TokenSequence:
        """The thread as it is before the token at a position is generated."""
        (root,) = self.request.threads
        sees = root.sees & (self.request.slots.positions < position)
        return TokenSequence(self.path, list(self.sequence[:position]), self.start, sees, fed=position)
