"""The inputs of a call in one block of memory, padded to one of few shapes.

One copy takes them to a GPU, and few shapes have to be compiled or captured there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import DTYPES, VISIBLE_STEP, Signature, logit_rows
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


class BlockRange(NamedTuple):
    """The location of an input in a block."""

    offset: int  # bytes
    shape: tuple[int, ...]


class Staging:
    """Pads the calls of an engine and writes them into blocks of memory."""

    def __init__(self, signature: Signature, capacity: int, rows: int) -> None:
        self._signature, self._capacity, self._rows = signature, capacity, rows
        self.wanted = logit_rows(rows, signature.row_logits)  # maximum rows with logits of a request
        self._ranges: dict[CallShape, dict[str, BlockRange]] = {}

    def padded(self, batch: Batch) -> CallShape:
        """The shape that a call is padded to; there are as few of them as possible."""
        requests, rows = batch.input_ids.shape
        visible, wanted = batch.attention_mask.shape[-1], batch.logit_rows.shape[1]
        most = self._rows
        if self._signature.lowering == "append":  # consecutive rows must not reach beyond the buffer
            starts = batch.slot_ids[:, 0]
            busy = starts[starts != self._capacity - rows]  # padding requests are moved to where they fit
            most = min(most, self._capacity - int(busy.max(initial=0)))
        return CallShape(
            requests,
            max(rows, min(_wide(rows), most)),
            min(_long(visible), self._capacity),
            max(wanted, min(_wide(wanted), self.wanted)),
        )

    def ranges(self, shape: CallShape) -> Mapping[str, BlockRange]:
        """The location of each input of a call in a block."""
        if shape not in self._ranges:
            sizes = {"B": shape.requests, "T": shape.rows, "A": shape.visible, "R": shape.wanted}
            offset, ranges = 0, self._ranges.setdefault(shape, {})
            for tensor in self._signature.rows:
                dims = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
                ranges[tensor.name] = BlockRange(offset, dims)
                offset += -(-math.prod(dims) * DTYPES[tensor.dtype].bytes // _ALIGNED) * _ALIGNED
        return self._ranges[shape]

    def bytes(self, shape: CallShape) -> int:
        """Number of bytes that a call uses in a block."""
        last = self._signature.rows[-1]
        offset, dims = self.ranges(shape)[last.name]
        return offset + math.prod(dims) * DTYPES[last.dtype].bytes

    def write(self, batch: Batch, shape: CallShape, block: NDArray[np.uint8]) -> None:
        """Write a call into a block, padded to a shape.

        Padding rows see slot 0, write to a slot that no row sees, and their results are not read.
        """
        rows, visible, ranges = batch.input_ids.shape[1], batch.attention_mask.shape[-1], self.ranges(shape)
        for tensor in self._signature.rows:
            offset, dims = ranges[tensor.name]
            view = np.ndarray(dims, np.dtype(tensor.dtype), block, offset)
            values = getattr(batch, tensor.name)
            if tensor.name == "slot_ids":
                self._write_slots(view, values)
            elif tensor.dtype == "bool":
                view[:, :, :rows, :visible] = values
                view[:, :, :rows, visible:] = False
                view[:, :, rows:] = False
                view[:, :, rows:, 0] = True
            else:
                view[:, : values.shape[1]] = values
                view[:, values.shape[1] :] = 0

    def _write_slots(self, view: NDArray[Any], slots: NDArray[np.int64]) -> None:
        rows, width = slots.shape[1], view.shape[1]
        if self._signature.lowering == "scatter":
            view[:, :rows] = slots
            view[:, rows:] = self._capacity - 1
        else:
            starts = slots[:, :1]
            idle = starts == self._capacity - rows
            view[:] = np.where(idle, self._capacity - width, starts) + np.arange(width)


@lru_cache(maxsize=4096)
def _wide(rows: int) -> int:
    return next((size for size in _ROWS if size >= rows), -(-rows // _MANY) * _MANY)


@lru_cache(maxsize=4096)
def _long(visible: int) -> int:
    """The visible length rounded up to three binary digits: at most a quarter longer."""
    units = -(-visible // VISIBLE_STEP)
    step = 1 << max(0, units.bit_length() - 3)
    return -(-units // step) * step * VISIBLE_STEP
