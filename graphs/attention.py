"""Attention: grouped attention of rows over the visible slots, with no repeated keys or values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic

NAME = "spaceport"

# A hidden slot's score falls by this much: enough that its weight is exactly 0, small enough that a row which
# sees nothing stays finite, and within the type (-1e9 is -inf in float16).
MASKED_SCORE = {torch.float32: -1e9, torch.bfloat16: -1e9, torch.float16: -1e4}

# What the attention interface may pass that changes nothing, or nothing that is not handled here.
_HARMLESS = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)


class UnsupportedAttention(ValueError):
    """A model asks of attention what the graph cannot say."""


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to the scores: 0 where a row may see, a large negative number elsewhere."""
    hidden = torch.tensor(MASKED_SCORE[dtype], dtype=dtype, device=visible.device)
    return torch.where(visible, torch.zeros_like(hidden), hidden)


def grouped_attention(
    query: Tensor,  # B x H x T x D
    key: Tensor,  # B x Hkv x A x D
    value: Tensor,  # B x Hkv x A x D
    mask: Tensor,  # B x 1 x T x A: additive_mask means matrix products here, bool means the ONNX Attention operator
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of every row over the visible slots: B x H x T x D."""
    if mask.dtype == torch.bool:
        if torch.onnx.is_in_onnx_export():
            return _attention_operator(query, key, value, mask, scale, softcap)
        mask = additive_mask(mask, query.dtype)
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * rows, dim) * scale
    scores = torch.matmul(folded, key.transpose(-1, -2))  # B x Hkv x groups * T x A, group by group
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    weights = torch.softmax((scores + hidden).to(torch.float32), dim=-1).to(query.dtype)
    return torch.matmul(weights, value).reshape(batch, heads, rows, dim)


def attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,  # B x planes x T x A: mask_plane 0 is what a row sees, mask_plane 1 (if any) the same within the window
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: the rows' output as B x T x H x D."""
    refuse_unknown(others)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mask = mask_plane(attention_mask, sliding_window is not None)
    return grouped_attention(query, key, value, mask, scale, softcap).transpose(1, 2).contiguous(), None


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None = None, **others: Any
) -> Tensor:
    """What families call that know no attention interface but torch's scaled_dot_product_attention."""
    refuse_unknown({name: value for name, value in others.items() if name not in ("dropout_p", "enable_gqa")})
    return grouped_attention(query, key, value, mask_plane(attn_mask, False), scale or query.shape[-1] ** -0.5)


def mask_plane(mask: Tensor, windowed: bool) -> Tensor:
    """The part of a mask of one or two planes that a layer goes by."""
    if mask.shape[1] == 1:
        return mask
    return mask[:, 1:2] if windowed else mask[:, 0:1]


def refuse_unknown(others: dict[str, Any]) -> None:
    """Raise if a model passes something to attention that would be lost here."""
    lost = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if lost:
        raise UnsupportedAttention(f"its attention takes {', '.join(lost)}, which the graph has no input for")


def _attention_operator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    attributes: dict[str, Any] = {"scale": float(scale), **({"softcap": float(softcap)} if softcap is not None else {})}
    return symbolic("Attention", (query, key, value, mask), attributes, dtype=query.dtype, shape=query.shape)
