"""Attention: grouped-query attention over the visible KV slots, without repeating keys or values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic

NAME = "spaceport"
# Attributes of attention modules: slots that only mask rows see, and what attends to 8-bit keys and values.
PRELOADED_SLOTS = "preloaded_slots"
INTEGER_ATTENTION = "integer_attention"

# Added to the score of a masked slot: low enough that its weight is exactly 0, and finite in the type (-1e9 is -inf in
# float16), so that a row that sees no slot does not become NaN.
MASKED_SCORE = {torch.float32: -1e9, torch.bfloat16: -1e9, torch.float16: -1e4}

# Arguments of the attention interface that need no handling here.
_IGNORED = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)


class UnsupportedAttention(ValueError):
    """A model needs a kind of attention that the graph does not support."""


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
            return _attention_operator(query, key, value, mask, scale, softcap)
        mask = additive_mask(mask, query.dtype)
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    grouped_query = query.reshape(batch, key.shape[1], groups * rows, dim) * scale
    scores = torch.matmul(grouped_query, key.transpose(-1, -2))  # B x Hkv x groups * T x A, group by group
    scores = capped(scores, softcap)
    grouped_mask = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    weights = torch.softmax((scores + grouped_mask).to(torch.float32), dim=-1).to(query.dtype)
    return torch.matmul(weights, value).reshape(batch, heads, rows, dim)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that approach a largest magnitude, or are unlimited."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


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
    attend = getattr(module, INTEGER_ATTENTION, grouped_attention)
    attended = attend(query, key, value, mask, scale, softcap).transpose(1, 2).contiguous()
    slots = getattr(module, PRELOADED_SLOTS, None)
    return (attended if slots is None else slots(attended, query, key, mask, scale, softcap)), None


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


def attention_modules(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The innermost modules with the index of a layer, by that index: attention, and in some families more."""
    indexed = {module: index for module in model.modules() if isinstance(index := _layer_of(module), int)}
    found: dict[int, list[nn.Module]] = {}
    for module, index in indexed.items():
        if not any(inner in indexed for inner in module.modules() if inner is not module):
            found.setdefault(index, []).append(module)
    return found


def _layer_of(module: nn.Module) -> object:
    return getattr(module, "layer_idx", None)


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise if a model passes an argument to attention that this implementation would ignore."""
    unsupported = sorted(name for name, value in arguments.items() if name not in _IGNORED and value is not None)
    if unsupported:
        raise UnsupportedAttention(f"its attention takes {', '.join(unsupported)}, which the graph has no input for")


def _attention_operator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    attributes: dict[str, Any] = {"scale": float(scale), **({"softcap": float(softcap)} if softcap is not None else {})}
    return symbolic("Attention", (query, key, value, mask), attributes, dtype=query.dtype, shape=query.shape)
