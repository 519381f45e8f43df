"""Grouped-query attention over the visible KV slots, without repeating keys or values, and the KV caches of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

NAME = "spaceport"

# Added to the score of a masked slot: low enough that its weight is exactly 0, and finite in the type (-1e9 is -inf in
# float16), so that a row that sees no slot does not become NaN.
MASKED_SCORE = {torch.float32: -1e9, torch.bfloat16: -1e9, torch.float16: -1e4}

# Writes the rows of a step into a KV buffer and returns the updated buffer.
Write = Callable[[Tensor, Tensor], Tensor]

# Arguments of the attention interface that need no handling here.
_IGNORED = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)


class UnsupportedAttention(ValueError):
    """A model needs a kind of attention that the graph does not support."""


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks of modules at the end of the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of a bool mask: 0 where a row may see a slot, a large negative number elsewhere."""
    masked = torch.tensor(MASKED_SCORE[dtype], dtype=dtype, device=visible.device)
    return torch.where(visible, torch.zeros_like(masked), masked)


def grouped_attention(
    query: Tensor,  # B x H x T x D
    key: Tensor,  # B x Hkv x A x D
    value: Tensor,  # B x Hkv x A x D
    mask: Tensor,  # B x 1 x T x A: additive = matmuls, bool = the ONNX Attention operator
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The attention output of every row: B x H x T x D."""
    if mask.dtype == torch.bool:
        if torch.onnx.is_in_onnx_export():
            attributes: dict[str, Any] = {"scale": float(scale)}
            attributes |= {} if softcap is None else {"softcap": float(softcap)}
            inputs = (query, key, value, mask)
            return symbolic("Attention", inputs, attributes, dtype=query.dtype, shape=query.shape)
        mask = additive_mask(mask, query.dtype)
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    grouped_query = query.reshape(batch, key.shape[1], groups * rows, dim) * scale
    scores = torch.matmul(grouped_query, key.transpose(-1, -2))  # B x Hkv x groups * T x A, group by group
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    grouped_mask = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    weights = torch.softmax((scores + grouped_mask).to(torch.float32), dim=-1).to(query.dtype)
    return torch.matmul(weights, value).reshape(batch, heads, rows, dim)


def attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,  # B x planes x T x A: plane 0 = visible slots, plane 1 (optional) = those within the window
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls instead of its own; returns B x T x H x D."""
    refuse_unknown(arguments)
    if key.shape[-1] != value.shape[-1]:  # transformers' eager attention accepts this
        shapes = f"{tuple(key.shape)}, {tuple(value.shape)}"
        raise UnsupportedAttention(f"it has keys and values of shapes {shapes}: expected one shape in all layers")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mask = mask_plane(attention_mask, sliding_window is not None)
    return grouped_attention(query, key, value, mask, scale, softcap).transpose(1, 2).contiguous(), None


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None = None, **arguments: Any
) -> Tensor:
    """Replaces torch's scaled_dot_product_attention in models that do not use transformers' interface."""
    refuse_unknown({name: value for name, value in arguments.items() if name not in ("dropout_p", "enable_gqa")})
    return grouped_attention(query, key, value, mask_plane(attn_mask, False), scale or query.shape[-1] ** -0.5)


def mask_plane(mask: Tensor, windowed: bool) -> Tensor:
    """The plane of the mask that a layer uses: B x 1 x T x A."""
    if mask.shape[1] == 1:
        return mask
    return mask[:, 1:2] if windowed else mask[:, 0:1]


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise if a model passes an argument to attention that this implementation would ignore."""
    unsupported = sorted(name for name, value in arguments.items() if name not in _IGNORED and value is not None)
    if unsupported:
        raise UnsupportedAttention(f"its attention takes {', '.join(unsupported)}, which the graph has no input for")


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


class _KvCache(Cache):
    """A cache object for a transformers model that knows nothing of the length of the text."""

    def __init__(self) -> None:
        self.layers = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def cache_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """The argument of a model's forward that takes a cache: transformers renamed it in version 5.24."""
    renamed = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


class SlotCache(_KvCache):
    """The cache object for a transformers model: stores rows with `write` and returns the visible slots."""

    def __init__(self, past: tuple[Tensor, ...], write: Write, visible: int, repeats: int = 1) -> None:
        super().__init__()
        self._past = past
        self._write = write
        self._visible = visible
        # how often the model repeats each KV head before caching; the buffer stores each head once
        self._repeats = repeats
        self.present: list[Tensor | None] = [None] * len(past)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key = self._store(2 * layer_idx, key_states)
        value = self._store(2 * layer_idx + 1, value_states)
        return key, value

    def _store(self, index: int, states: Tensor) -> Tensor:
        stored = states[:, :: self._repeats] if self._repeats > 1 else states
        written = self._write(self._past[index], stored)
        self.present[index] = written
        return written[:, :, : self._visible]


class RecordingCache(_KvCache):
    """A cache that records the keys and values of one eager run, to read their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.recorded[layer_idx] = (key_states, value_states)
        return key_states, value_states


class RecordedPrefix(_KvCache):
    """A cache that returns recorded keys and values followed by those of the rows at hand, which alone have gradients."""

    def __init__(self, prefix: RecordingCache) -> None:
        super().__init__()
        self._prefix = prefix.recorded

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = self._prefix[layer_idx]
        return torch.cat((key, key_states), dim=2), torch.cat((value, value_states), dim=2)
