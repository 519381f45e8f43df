"""Staging: the inputs of a call in one block of memory, padded to one of few shapes.

One copy takes them to a GPU, and few shapes have to be compiled or captured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.dtypes import NUMPY
from spaceport.graphs.contract.signature import VISIBLE_STEP, Signature
from spaceport.runtime.engine import Batch

# Rows that calls are padded to: the most frequent widths of steps, then multiples of 64.
_ROWS = (1, 2, 4, 6, 9, 12, 16, 20, 24, 30, 36, 48, 64)
_MANY = 64
_ALIGNED = 256  # bytes: alignment that GPUs and their libraries prefer


class CallShape(NamedTuple):
    """The shape of a call."""

    requests: int  # B
    rows: int  # T
    visible: int  # A
    wanted: int  # R

    def logits(self, signature: Signature) -> tuple[int, int, int]:
        """The shape of the logits: requests x lines x vocabulary."""
        return self.requests, self.wanted * signature.lines, signature.vocab_size

    def __str__(self) -> str:
        """The shape with the names of the graph's dimensions, for messages."""
        return f"(B {self.requests}, T {self.rows}, A {self.visible}, R {self.wanted})"


@dataclass(frozen=True)
class CallLimits:
    """The largest call of an engine."""

    capacity: int  # slots of a request
    rows: int
    wanted: int


def shape_of(batch: Batch) -> CallShape:
    """The shape of a call without padding."""
    requests, rows = batch.input_ids.shape
    return CallShape(requests, rows, batch.attention_mask.shape[-1], batch.logit_rows.shape[1])


def filled_up(batch: Batch, signature: Signature, limits: CallLimits) -> CallShape:
    """The shape that a call is padded to; there are as few of them as possible."""
    requests, rows, visible, wanted = shape_of(batch)
    most = limits.rows
    if signature.lowering == "append":  # consecutive rows must not reach beyond the buffer
        starts = batch.slot_ids[:, 0]
        busy = starts[starts != limits.capacity - rows]  # padding requests are moved to where they fit
        most = min(most, limits.capacity - int(busy.max(initial=0)))
    return CallShape(
        requests,
        max(rows, min(_wide(rows), most)),
        min(_long(visible), limits.capacity),
        max(wanted, min(_wide(wanted), limits.wanted)),
    )


@lru_cache(maxsize=4096)
def _wide(rows: int) -> int:
    return next((size for size in _ROWS if size >= rows), -(-rows // _MANY) * _MANY)


@lru_cache(maxsize=4096)
def _long(visible: int) -> int:
    """The visible length rounded up to three binary digits: at most a quarter longer."""
    units = -(-visible // VISIBLE_STEP)
    step = 1 << max(0, units.bit_length() - 3)
    return -(-units // step) * step * VISIBLE_STEP


class Block:
    """Memory for all inputs of a call, one after the other."""

    def __init__(self, memory: NDArray[np.uint8], signature: Signature) -> None:
        self.memory = memory
        self._signature = signature
        self._views: dict[CallShape, dict[str, NDArray[Any]]] = {}

    def write(self, batch: Batch, shape: CallShape, capacity: int) -> int:
        """Write a call into the block, padded to a shape; returns the number of bytes used.

        Padding rows see slot 0, write to a slot that no row sees, and their results are not read.
        """
        views = self._of(shape)
        _, rows, visible, wanted = shape_of(batch)
        for name in ("input_ids", "position_ids"):
            views[name][:, :rows] = getattr(batch, name)
            views[name][:, rows:] = 0
        self._write_slots(views["slot_ids"], batch.slot_ids, capacity)
        for name in ("attention_mask", "sliding_attention_mask"):
            if name in views:
                mask = views[name]
                mask[:, :, :rows, :visible] = getattr(batch, name)
                mask[:, :, :rows, visible:] = False
                mask[:, :, rows:] = False
                mask[:, :, rows:, 0] = True
        views["logit_rows"][:, :wanted] = batch.logit_rows
        views["logit_rows"][:, wanted:] = 0
        return end_of(self._signature, shape)

    def _write_slots(self, view: NDArray[Any], slots: NDArray[np.int64], capacity: int) -> None:
        rows, width = slots.shape[1], view.shape[1]
        if self._signature.lowering == "scatter":
            view[:, :rows] = slots
            view[:, rows:] = capacity - 1
            return
        starts = slots[:, :1]
        idle = starts == capacity - rows
        view[:] = np.where(idle, capacity - width, starts) + np.arange(width)

    def _of(self, shape: CallShape) -> Mapping[str, NDArray[Any]]:
        views = self._views.get(shape)
        if views is None:
            views = self._views[shape] = {
                name: self.memory[part.offset : part.offset + part.bytes].view(part.dtype).reshape(part.shape)
                for name, part in ranges_of(self._signature, shape).items()
            }
        return views


class BlockRange(NamedTuple):
    """The location of an input in a block."""

    offset: int  # bytes
    bytes: int
    shape: tuple[int, ...]
    dtype: type[np.generic]


@lru_cache(maxsize=4096)
def ranges_of(signature: Signature, shape: CallShape) -> Mapping[str, BlockRange]:
    """The location of each input of a call in a block."""
    sizes = {"B": shape.requests, "T": shape.rows, "A": shape.visible, "R": shape.wanted}
    found, offset = {}, 0
    for tensor in signature.rows:
        dims = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        dtype = NUMPY[tensor.dtype]
        size = int(np.prod(dims)) * np.dtype(dtype).itemsize
        found[tensor.name] = BlockRange(offset, size, dims, dtype)
        offset += -(-size // _ALIGNED) * _ALIGNED
    return found


def end_of(signature: Signature, shape: CallShape) -> int:
    """Number of bytes that a call uses in a block."""
    last = [*ranges_of(signature, shape).values()][-1]
    return last.offset + last.bytes
