"""KV: the buffer inside the graph; rows are written to their slots in place, the visible part is read."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.onnx.ops import symbolic
from transformers.cache_utils import Cache


class Write(Protocol):
    """Puts the rows of a step into one buffer and returns the buffer that holds them."""

    def __call__(self, buffer: Tensor, rows: Tensor) -> Tensor: ...


class Scatter:
    """Writes each row to a slot of its own."""

    def __init__(self, slot_ids: Tensor, heads: int) -> None:
        batch, rows = slot_ids.shape
        shape = (batch, heads, rows)
        b = torch.arange(batch, device=slot_ids.device)[:, None, None].expand(shape)
        h = torch.arange(heads, device=slot_ids.device)[None, :, None].expand(shape)
        self._where = torch.stack((b, h, slot_ids[:, None, :].expand(shape)), dim=-1)  # B x Hkv x T x 3

    def __call__(self, buffer: Tensor, rows: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            return symbolic("ScatterND", (buffer, self._where, rows), dtype=buffer.dtype, shape=buffer.shape)
        return buffer.index_put_(tuple(self._where.unbind(-1)), rows)


class Append:
    """Writes the rows of a request to a run of slots; only the first slot of the run is read."""

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
    """What a transformers model takes for its cache: it writes rows through `write` and shows the visible slots."""

    def __init__(self, past: tuple[Tensor, ...], write: Write, visible: int, repeats: int = 1) -> None:
        self.layers = []
        self._past = past
        self._write = write
        self._visible = visible
        self._repeats = repeats  # families that repeat each KV head before they cache it: every n-th is kept
        self.present: list[Tensor | None] = [None] * len(past)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key = self._put(2 * layer_idx, key_states)
        value = self._put(2 * layer_idx + 1, value_states)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def _put(self, index: int, states: Tensor) -> Tensor:
        kept = states[:, :: self._repeats] if self._repeats > 1 else states
        written = self._write(self._past[index], kept)
        self.present[index] = written
        return written[:, :, : self._visible]


class RecordingCache(Cache):
    """A cache that keeps what one eager run gives it, so that shapes are known instead of guessed."""

    def __init__(self) -> None:
        self.layers = []
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
