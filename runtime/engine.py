"""Engine: a compiled graph behind one small interface, and the plans of a step packed into its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature, visible_length
from spaceport.runtime.costs import Costs
from spaceport.runtime.decode.plan import Plan, sees, within
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.slots import Moves

_NO_ROWS = np.zeros((1, 1), np.int64)  # a graph gives the logits of one row at least


class EngineFault(RuntimeError):
    """An engine refused a step or failed in it; the message names the engine."""


@dataclass(frozen=True)
class Batch:
    """The arrays of one call, for the requests `first` to `first + B - 1` of the engine."""

    first: int
    input_ids: NDArray[np.int64]  # B x T
    position_ids: NDArray[np.int64]  # B x T
    slot_ids: NDArray[np.int64]  # B x T
    attention_mask: NDArray[np.bool_]  # B x 1 x T x A
    logit_rows: NDArray[np.int64]  # B x R
    sliding_attention_mask: NDArray[np.bool_] | None = None  # B x 1 x T x A

    @property
    def requests(self) -> int:
        return len(self.input_ids)

    def arrays(self, signature: Signature) -> list[tuple[str, NDArray[np.int64] | NDArray[np.bool_]]]:
        """The arrays by their names in the graph."""
        return [(tensor.name, getattr(self, tensor.name)) for tensor in signature.rows]


class Engine(Protocol):
    """Runs steps over KV buffers that it owns."""

    @property
    def signature(self) -> Signature: ...

    @property
    def capacity(self) -> int:
        """Slots of each request."""

    @property
    def requests(self) -> int:
        """How many requests it has buffers for."""

    @property
    def rows(self) -> int:
        """Most rows of one request in a step."""

    @property
    def device(self) -> str: ...

    @property
    def costs(self) -> Costs:
        """What its calls take."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever opened it should know: a sentence each."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the wanted rows, B x R x V; they hold until the next call."""

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        """Copy slots over all layers, for the requests from `first` on."""

    def clear(self, request: int) -> None:
        """Zero the buffers of a request: what is not a number in them would spread to whoever has them next."""

    def close(self) -> None: ...


def pack(
    engine: Engine, requests: Sequence[Request], plans: Sequence[Plan], taken: Sequence[NDArray[np.int64]]
) -> Batch:
    """The arrays for one plan of each request; `requests` are in the order of their indices."""
    if len(requests) == 1 and len(plans[0].parts) == 1:
        return pack_one(engine.signature, requests[0], plans[0], taken[0])
    return pack_many(engine, requests, plans, taken)


def pack_many(
    engine: Engine, requests: Sequence[Request], plans: Sequence[Plan], taken: Sequence[NDArray[np.int64]]
) -> Batch:
    """Arrays as wide as the widest plan.

    Rows and requests that only fill up see slot 0, write where nobody reads and are never read themselves.
    """
    signature = engine.signature
    first = requests[0].index
    count = requests[-1].index - first + 1
    rows = max(plan.rows for plan in plans)
    wanted = max(1, *(plan.wanted for plan in plans))
    visible = visible_length(max(request.slots.height for request in requests))
    batch = Batch(
        first=first,
        input_ids=np.zeros((count, rows), np.int64),
        position_ids=np.zeros((count, rows), np.int64),
        slot_ids=np.full((count, rows), engine.capacity - 1, np.int64),
        attention_mask=np.zeros((count, 1, rows, visible), np.bool_),
        logit_rows=np.zeros((count, wanted), np.int64),
        sliding_attention_mask=np.zeros((count, 1, rows, visible), np.bool_) if signature.window else None,
    )
    if count > len(requests) or len({plan.rows for plan in plans}) > 1:
        _fill(batch, engine)
    for request, plan, slots in zip(requests, plans, taken, strict=True):
        _place(batch, signature, request, plan, slots)
    return batch


def pack_one(signature: Signature, request: Request, plan: Plan, slots: NDArray[np.int64]) -> Batch:
    """What `pack` makes of one thread of one request: nothing is filled up, so the plan's own arrays serve."""
    (part,) = plan.parts
    mask = sees(plan, slots, visible_length(request.slots.height))
    near = None
    if signature.window is not None:
        near = within(signature.window, mask, part.positions, request.slots.positions)[None, None]
    return Batch(
        first=request.index,
        input_ids=part.tokens[None],
        position_ids=part.positions[None],
        slot_ids=slots[None],
        attention_mask=mask[None, None],
        logit_rows=part.rows_wanted[None] if part.wanted else _NO_ROWS,
        sliding_attention_mask=near,
    )


def split(plan: Plan, logits: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The logits of one request, R x V, part by part."""
    lines, first = [], 0
    for part in plan.parts:
        lines.append(logits[first : first + part.wanted])
        first += part.wanted
    return lines


def _fill(batch: Batch, engine: Engine) -> None:
    batch.attention_mask[..., 0] = True
    if batch.sliding_attention_mask is not None:
        batch.sliding_attention_mask[..., 0] = True
    if engine.signature.lowering == "append":
        rows = batch.slot_ids.shape[1]
        batch.slot_ids[:] = np.arange(engine.capacity - rows, engine.capacity)


def _place(batch: Batch, signature: Signature, request: Request, plan: Plan, slots: NDArray[np.int64]) -> None:
    line, rows = request.index - batch.first, plan.rows
    positions = plan.positions
    visible = batch.attention_mask.shape[-1]
    wanted, start = 0, 0
    for part in plan.parts:
        end = start + part.layout.rows
        batch.input_ids[line, start:end] = part.tokens
        batch.logit_rows[line, wanted : wanted + part.wanted] = part.rows_wanted + start
        start, wanted = end, wanted + part.wanted
    batch.position_ids[line, :rows] = positions
    batch.slot_ids[line, :rows] = slots
    if signature.lowering == "append":
        batch.slot_ids[line] = slots[0] + np.arange(batch.slot_ids.shape[1])
    mask = sees(plan, slots, visible)
    batch.attention_mask[line, 0, :rows] = mask
    if batch.sliding_attention_mask is not None and signature.window is not None:
        near = within(signature.window, mask, positions, request.slots.positions)
        batch.sliding_attention_mask[line, 0, :rows] = near
