"""Pack: the planned rows of requests as the arrays of one engine call, and the logits of each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature, visible_length
from spaceport.runtime.decode.plan import Plan, sees, within
from spaceport.runtime.decode.request import ScheduledStep
from spaceport.runtime.engine import Batch, Engine

_NO_ROWS = np.zeros((1, 1), np.int64)  # a graph returns the logits of at least one row


def pack(engine: Engine, call: Sequence[ScheduledStep]) -> Batch:
    """The arrays of one call; its steps are in the order of their indices."""
    if len(call) == 1 and len(call[0].plan.parts) == 1:
        return pack_one(engine.signature, call[0])
    return pack_many(engine, call)


def pack_many(engine: Engine, call: Sequence[ScheduledStep]) -> Batch:
    """The arrays of a call with several threads or requests, padded to the widest plan.

    Padding rows see slot 0, write to a slot that no row sees, and their results are not read.
    """
    signature = engine.signature
    first = call[0].engine_index
    count = call[-1].engine_index - first + 1
    rows = max(step.plan.rows for step in call)
    wanted = max(1, *(step.plan.wanted for step in call))
    visible = visible_length(max(step.request.slots.height for step in call))
    batch = Batch(
        first=first,
        input_ids=np.zeros((count, rows), np.int64),
        position_ids=np.zeros((count, rows), np.int64),
        slot_ids=np.full((count, rows), engine.capacity - 1, np.int64),
        attention_mask=np.zeros((count, 1, rows, visible), np.bool_),
        logit_rows=np.zeros((count, wanted), np.int64),
        sliding_attention_mask=np.zeros((count, 1, rows, visible), np.bool_) if signature.window else None,
    )
    if count > len(call) or len({step.plan.rows for step in call}) > 1:
        _pad(batch, engine)
    for step in call:
        _fill(batch, signature, step)
    return batch


def pack_one(signature: Signature, step: ScheduledStep) -> Batch:
    """The same as `pack_many` for one thread of one request: without padding, the plan's own arrays are used."""
    (part,) = step.plan.parts
    slots = step.request.slots
    mask = sees(step.plan, step.slots, visible_length(slots.height))
    near = None
    if signature.window is not None:
        near = within(signature.window, mask, part.positions, slots.positions)[None, None]
    return Batch(
        first=step.engine_index,
        input_ids=part.tokens[None],
        position_ids=part.positions[None],
        slot_ids=step.slots[None],
        attention_mask=mask[None, None],
        logit_rows=part.rows_wanted[None] if part.wanted else _NO_ROWS,
        sliding_attention_mask=near,
    )


def split(plan: Plan, logits: NDArray[np.float32], lines: int = 1) -> list[NDArray[np.float32]]:
    """The logits of one request, L x V, part by part; each row has `lines` lines: its own, then those of the heads."""
    if len(plan.parts) == 1:
        return [logits[: plan.parts[0].wanted * lines]]
    parts, first = [], 0
    for part in plan.parts:
        last = first + part.wanted * lines
        parts.append(logits[first:last])
        first = last
    return parts


def _pad(batch: Batch, engine: Engine) -> None:
    batch.attention_mask[..., 0] = True
    if batch.sliding_attention_mask is not None:
        batch.sliding_attention_mask[..., 0] = True
    if engine.signature.lowering == "append":
        rows = batch.slot_ids.shape[1]
        batch.slot_ids[:] = np.arange(engine.capacity - rows, engine.capacity)


def _fill(batch: Batch, signature: Signature, step: ScheduledStep) -> None:
    line, plan, rows = step.engine_index - batch.first, step.plan, step.plan.rows
    positions = plan.positions
    visible = batch.attention_mask.shape[-1]
    wanted, start = 0, 0
    for part in plan.parts:
        end = start + part.layout.rows
        batch.input_ids[line, start:end] = part.tokens
        rows_wanted = part.rows_wanted
        batch.logit_rows[line, wanted : wanted + rows_wanted.size] = rows_wanted + start
        start, wanted = end, wanted + rows_wanted.size
    batch.position_ids[line, :rows] = positions
    batch.slot_ids[line, :rows] = step.slots
    if signature.lowering == "append":
        batch.slot_ids[line] = step.slots[0] + np.arange(batch.slot_ids.shape[1])
    mask = sees(plan, step.slots, visible, batch.attention_mask[line, 0, :rows])
    if batch.sliding_attention_mask is not None and signature.window is not None:
        near = within(signature.window, mask, positions, step.request.slots.positions)
        batch.sliding_attention_mask[line, 0, :rows] = near
