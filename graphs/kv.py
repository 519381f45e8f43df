"""KV: a KV cache in buffers of slots, written in place inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.onnx.ops import symbolic
from transformers.cache_utils import Cache

# The keys and values of a layer as the buffers store them.
Quantize = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class Write(Protocol):
    """Writes the rows of a step into a KV buffer and returns the updated buffer."""

    def __call__(self, buffer: Tensor, rows: Tensor) -> Tensor: ...


class Scatter:
    """Writes each row to any slot, with ScatterND."""

    def __init__(self, slot_ids: Tensor, heads: int) -> None:
        batch, rows = slot_ids.shape
        shape = (batch, heads, rows)
        b = torch.arange(batch, device=slot_ids.device)[:, None, None].expand(shape)
        h = torch.arange(heads, device=slot_ids.device)[None, :, None].expand(shape)
        self._indices = torch.stack((b, h, slot_ids[:, None, :].expand(shape)), dim=-1)  # B x Hkv x T x 3

    def __call__(self, buffer: Tensor, rows: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            return symbolic("ScatterND", (buffer, self._indices, rows), dtype=buffer.dtype, shape=buffer.shape)
        return buffer.index_put_(tuple(self._indices.unbind(-1)), rows)


class Append:
    """Writes the rows of a request to consecutive slots from the first slot id on, with TensorScatter."""

    def __init__(self, slot_ids: Tensor) -> None:
        self._start = slot_ids[:, 0]

    def __call__(self, buffer: Tensor, rows: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            attributes: dict[str, Any] = {"axis": -2, "mode": "linear"}
            inputs = (buffer, rows, self._start)
            return symbolic("TensorScatter", inputs, attributes, dtype=buffer.dtype, shape=buffer.shape)
        for request, start in enumerate(self._start.tolist()):
            buffer[request, :, start : start + rows.shape[2]] = rows[request]
        return buffer


class SlotCache(Cache):
    """The cache object for a transformers model: stores rows with `write` and returns the visible slots."""

    def __init__(
        self,
        past: tuple[Tensor, ...],
        write: Write,
        visible: int,
        repeats: int = 1,
        quantize: Quantize | None = None,
    ) -> None:
        self.layers = []
        self._past = past
        self._write = write
        self._visible = visible
        self._repeats = (
            repeats  # how often the model repeats each KV head before caching; the buffer stores each head once
        )
        self._quantize = quantize  # None: the buffers have the type of the states
        self.present: list[Tensor | None] = [None] * len(past)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._quantize is not None:
            key_states, value_states = self._quantize(layer_idx, key_states, value_states)
        key = self._store(2 * layer_idx, key_states)
        value = self._store(2 * layer_idx + 1, value_states)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def _store(self, index: int, states: Tensor) -> Tensor:
        stored = states[:, :: self._repeats] if self._repeats > 1 else states
        written = self._write(self._past[index], stored)
        self.present[index] = written
        return written[:, :, : self._visible]


class RecordingCache(Cache):
    """A cache that records the keys and values of one eager run, to read their shapes."""

    def __init__(self) -> None:
        self.layers = []
        self.recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.recorded[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class PrefixCache(Cache):
    """A cache that returns recorded keys and values followed by those of the rows at hand, which alone have gradients."""

    def __init__(self, prefix: RecordingCache) -> None:
        self.layers = []
        self._prefix = prefix.recorded

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = self._prefix[layer_idx]
        return torch.cat((key, key_states), dim=2), torch.cat((value, value_states), dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
