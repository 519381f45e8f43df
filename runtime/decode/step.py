"""Step: one step of the decode loop: plan, run, verify, keep; and the arrays of its engine calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import LibraryPanic, is_panic
from spaceport.graphs.contract.signature import Signature, visible_length
from spaceport.runtime.decode.draft import PLAIN, Draft
from spaceport.runtime.decode.plan import accept, joined, mark_visible, within
from spaceport.runtime.decode.planner import SharedCall
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.engine import NO_MOVES, Batch, Engine, SelectedRows

_FIRST_ROW = np.zeros(1, np.int64)  # a graph returns the logits of at least one row

Call = Sequence[RequestStep]  # in the order of their indices
Grouping = Callable[[Sequence[RequestStep]], Sequence[Call]]
# Called with the index of a request that failed, and its error; the other requests of the step continue. When a whole
# call fails, it is called for each request of the call, also for those that failed before or ended in this step.
OnFailure = Callable[[int, Exception], None]
OnCall = Callable[[], None]  # called after each engine call
Logits = NDArray[np.float32] | list[SelectedRows]  # requests x lines x vocabulary, or the best tokens instead


def pack(engine: Engine, call: Call) -> Batch:
    """The arrays of one call."""
    return _pack_one(engine.signature, call[0]) if len(call) == 1 else _pack_many(engine, call)


def _pack_many(engine: Engine, call: Call) -> Batch:
    """The arrays of a call with several requests, padded to the widest step.

    Padding rows see slot 0, write to a slot that no row sees, and their results are not read.
    """
    signature, first = engine.signature, call[0].engine_index
    count, total = call[-1].engine_index - first + 1, 0
    rows = wanted = height = 1
    for request_step in call:
        total += request_step.rows
        rows, wanted = max(rows, request_step.rows), max(wanted, request_step.logit_rows.size)
        height = max(height, request_step.sequences.slots.height)
    visible = visible_length(height)
    batch = Batch(
        first=first,
        input_ids=np.zeros((count, rows), np.int64),
        position_ids=np.zeros((count, rows), np.int64),
        slot_ids=np.empty((count, rows), np.int64),
        attention_mask=np.zeros((count, 1, rows, visible), np.bool_),
        logit_rows=np.zeros((count, wanted), np.int64),
        sliding_attention_mask=np.zeros((count, 1, rows, visible), np.bool_) if signature.window else None,
    )
    if total < count * rows:
        _pad(batch, engine)
    for request_step in call:
        line, end = request_step.engine_index - first, request_step.rows
        batch.input_ids[line, :end] = request_step.tokens
        batch.position_ids[line, :end] = request_step.positions
        batch.slot_ids[line, :end] = request_step.slots
        batch.logit_rows[line, : request_step.logit_rows.size] = request_step.logit_rows
        if signature.lowering == "append":
            batch.slot_ids[line] = request_step.slots[0] + np.arange(rows)
        mask = batch.attention_mask[line, 0, :end]
        mark_visible(request_step.parts, request_step.slots, mask)
        if batch.sliding_attention_mask is not None and signature.window is not None:
            near = within(signature.window, mask, request_step.positions, request_step.sequences.slots.positions)
            batch.sliding_attention_mask[line, 0, :end] = near
    return batch


def _pack_one(signature: Signature, step: RequestStep) -> Batch:
    """The same as `_pack_many` for one request: without padding, the step's own arrays are used."""
    slots = step.sequences.slots
    mask = np.empty((step.rows, visible_length(slots.height)), np.bool_)
    mark_visible(step.parts, step.slots, mask)
    near = None
    if signature.window is not None:
        near = within(signature.window, mask, step.positions, slots.positions)[None, None]
    return Batch(
        first=step.engine_index,
        input_ids=step.tokens[None],
        position_ids=step.positions[None],
        slot_ids=step.slots[None],
        attention_mask=mask[None, None],
        logit_rows=(step.logit_rows if step.logit_rows.size else _FIRST_ROW)[None],
        sliding_attention_mask=near,
    )


def _pad(batch: Batch, engine: Engine) -> None:
    batch.attention_mask[..., 0] = True
    if batch.sliding_attention_mask is not None:
        batch.sliding_attention_mask[..., 0] = True
    rows = batch.slot_ids.shape[1] if engine.signature.lowering == "append" else 1
    batch.slot_ids[:] = np.arange(engine.capacity - rows, engine.capacity)


def one_call(steps: Sequence[RequestStep]) -> Sequence[Call]:
    """All requests in one call of the engine."""
    return [steps] if steps else []


def step(
    engine: Engine,
    steps: Sequence[RequestStep],
    group: Grouping = one_call,
    on_failure: OnFailure | None = None,
    on_call: OnCall | None = None,
) -> float:
    """Feed a prefill chunk or generate at least one token in every live thread; returns the seconds spent in the engine.

    `steps` are in the order of their indices. Without `on_failure`, an error of a request is raised.
    """
    seconds = 0.0
    for call in group(plan(steps, on_failure)):
        try:
            logits = run(engine, call)
            seconds += call[0].engine_seconds
            if on_call is not None:
                on_call()
            keep(engine, call, verify(engine, call, logits, on_failure), on_failure)
        except BaseException as error:
            if not _reported(call, error, on_failure):
                raise
    return seconds


def plan(steps: Sequence[RequestStep], on_failure: OnFailure | None = None) -> list[RequestStep]:
    """The steps with the rows of each request, and a KV slot for each row, without those that have failed."""
    scheduled = []
    for request_step, drafts in draft(steps, on_failure):
        sequences = request_step.sequences
        try:
            request_step.parts = parts = sequences.plan(request_step.prefill_rows, drafts)
            part = parts[0]
            request_step.tokens, request_step.positions, request_step.logit_rows, order = (
                (part.tokens, part.positions, part.rows_wanted, part.layout.slot_order)
                if len(parts) == 1
                else joined(parts)
            )
            request_step.rows = order.size
            request_step.slots = sequences.slots.allocate(request_step.positions, order)
            scheduled.append(request_step)
        except BaseException as error:
            if not _reported((request_step,), error, on_failure):
                raise
    return scheduled


def draft(steps: Sequence[RequestStep], on_failure: OnFailure | None = None) -> list[tuple[RequestStep, list[Draft]]]:
    """The drafts of each request that has not failed; requests in one call get the width that pays for all of them."""
    decoding = [request_step.sequences for request_step in steps if not request_step.sequences.prefilling]
    drafting = len([sequences for sequences in decoding if sequences.drafter.drafts])
    call = SharedCall(len(decoding)) if drafting and len(decoding) > 1 else None
    drafted, shared = [], []
    for request_step in steps:
        sequences = request_step.sequences
        try:
            own_call = None if sequences.prefilling else call
            if own_call is None and not sequences.drafter.drafts:
                drafts = [PLAIN] * len(sequences.live)
            else:
                drafts = sequences.draft(request_step.prefill_rows, own_call)
            drafted.append((request_step, drafts))
            if not sequences.prefilling:
                shared.append(drafts)
        except BaseException as error:
            if not _reported((request_step,), error, on_failure):
                raise
    wide = [drafts for drafts in shared if len(drafts) > 1 or drafts[0].masks != PLAIN.masks]
    if call is not None and wide:
        fixed = [drafts for drafts in wide if len(drafts) > 1 or not drafts[0].order]
        call.decide(max([sum([one.rows for one in drafts]) for drafts in fixed], default=1))
        for drafts in wide:
            if len(drafts) == 1:
                drafts[0] = drafts[0].cut(call.width, "shared_call")
    return drafted


def run(engine: Engine, call: Call) -> Logits:
    """The logits of the needed rows, or their best tokens if no request needs more; the time counts for each request."""
    batch = pack(engine, call)
    selects = engine.selects and all(request_step.sequences.selects for request_step in call)
    started = perf_counter()
    logits: Logits = engine.select(batch) if selects else engine.run(batch)
    seconds = perf_counter() - started
    requests, rows = batch.input_ids.shape
    for request_step in call:
        request_step.engine_seconds = seconds
        statistics = request_step.sequences.statistics
        statistics.engine_seconds += seconds
        statistics.padding_rows += rows - request_step.rows
    call[0].sequences.statistics.padding_rows += rows * (requests - len(call))  # idle requests between them
    return logits


def verify(engine: Engine, call: Call, logits: Logits, on_failure: OnFailure | None = None) -> list[RequestStep]:
    """The steps with the accepted rows of each request, by the tokens that the model itself selects."""
    verified, first, lines = [], call[0].engine_index, engine.signature.lines
    for request_step in call:
        sequences, config, verdicts, end = request_step.sequences, request_step.sequences.draft_config, [], 0
        # selected rows are only made for selectors that take them, and are split like logits
        own: Any = logits[request_step.engine_index - first]
        try:
            for part in request_step.parts:
                begin, end = end, end + part.rows_wanted.size * lines  # a row has its own line and those of the heads
                of_part, selector = own[begin:end], sequences.selector
                verdicts.append(accept(part, of_part, selector, config.candidates, lines, config.heads))
            request_step.verdicts = verdicts
            if sequences.observers:
                _observe(request_step, own, lines)
            verified.append(request_step)
        except BaseException as error:
            if not _reported((request_step,), error, on_failure):
                raise
    return verified


def _observe(step: RequestStep, logits: Logits, lines: int) -> None:
    """Pass a verified step with its logits to the observers of the request."""
    sequences = step.sequences
    step.held, step.queued = sequences.slots.held, tuple(sequences.queue)
    step.outside_seconds = sequences.statistics.outside_seconds
    if isinstance(logits, np.ndarray):
        ends = [*accumulate([part.rows_wanted.size for part in step.parts])]
        by_part = np.split(logits[: ends[-1] * lines].reshape(-1, lines, logits.shape[-1]), ends[:-1])
        step.logits, step.head_logits = [rows[:, 0] for rows in by_part], [rows[:, 1:] for rows in by_part]
    for observer in sequences.observers:
        observer.on_step(step)
    step.logits = step.head_logits = ()


def keep(engine: Engine, call: Call, verified: Call, on_failure: OnFailure | None = None) -> None:
    """Keep the slots of accepted rows, free those of rejected rows, and append the accepted tokens."""
    first = call[0].engine_index
    moves = [NO_MOVES] * (call[-1].engine_index - first + 1)
    for request_step in verified:
        try:
            moves[request_step.engine_index - first] = request_step.sequences.commit(request_step)
        except BaseException as error:
            if not _reported((request_step,), error, on_failure):
                raise
    if engine.signature.lowering == "append":
        engine.move(first, moves)


def _reported(steps: Sequence[RequestStep], error: BaseException, on_failure: OnFailure | None) -> bool:
    """Report an error that these requests had; False: it has to be raised, as always without `on_failure`."""
    if is_panic(error):
        error = LibraryPanic(f"a panic in a step: {error}: change the request, or update the library")
    if on_failure is None or not isinstance(error, Exception):
        return False
    for failed in steps:
        on_failure(failed.engine_index, error)
    return True
