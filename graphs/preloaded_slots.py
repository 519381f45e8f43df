"""Preloaded slots: key/value pairs that only mask rows see.

The slots are constants of the graph, beside the KV buffers. A mask row attends to the visible text and to all slots of its
layer in one softmax, which is computed in two parts: the attention to the text, as every row has it, and that to the slots.
The parts are merged by the sums of their exponentials. Other rows get the attention to the text bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.attention import PRELOADED_SLOTS, additive_mask, attention_modules, capped
from spaceport.graphs.gated import Gate, gate_of
from spaceport.graphs.traits import UnsupportedModel, class_name

_ADVICE = "export the model without them: set prefix to null in sar_config.json"


@dataclass(frozen=True, eq=False)
class PreloadedSlots:
    """The slots of all layers. H' is the number of KV heads, or a multiple of it up to that of query heads."""

    keys: Tensor  # layers x H' x slots x D, after the rotary embedding
    values: Tensor  # layers x H' x slots x D

    @property
    def count(self) -> int:
        """The number of slots."""
        return int(self.keys.shape[2])

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.keys, self.values


class LayerSlots(nn.Module):
    """The preloaded slots of a layer."""

    def __init__(self, gate: Gate, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.gate = gate
        self.keys = nn.Parameter(keys, requires_grad=False)  # H' x slots x D
        self.values = nn.Parameter(values, requires_grad=False)

    @property
    def count(self) -> int:
        """The number of slots."""
        return int(self.keys.shape[1])

    def forward(
        self,
        attended: Tensor,  # B x T x H x D: the attention output of the text
        query: Tensor,  # B x H x T x D
        key: Tensor,  # B x Hkv x A x D
        mask: Tensor,  # B x 1 x T x A, bool or additive
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """The attention output with these slots in mask rows, and without them in all others: B x T x H x D."""
        batch, heads, rows, dim = query.shape
        scaled = query * scale
        text_peak, text_sum = _text_sums(scaled, key, mask, softcap)  # B x H x T x 1
        own = scaled.reshape(batch, self.keys.shape[0], -1, dim).float()
        scores = capped(torch.matmul(own, self.keys.float().transpose(-1, -2)), softcap).reshape(
            batch, heads, rows, self.count
        )
        peak = torch.maximum(text_peak, scores.amax(dim=-1, keepdim=True))
        text_weight = text_sum * torch.exp(text_peak - peak)
        weights = torch.exp(scores - peak)  # B x H x T x slots
        loaded = torch.matmul(weights.reshape(batch, self.keys.shape[0], -1, self.count), self.values.float())
        loaded = loaded.reshape(query.shape).transpose(1, 2)  # B x T x H x D
        text_weight, total = (
            weight.transpose(1, 2) for weight in (text_weight, text_weight + weights.sum(dim=-1, keepdim=True))
        )
        merged = (attended.float() * text_weight + loaded) / total
        return torch.where(self.gate.open_rows[..., None], merged.to(attended.dtype), attended)


def add_preloaded_slots(model: PreTrainedModel, mask_ids: tuple[int, ...], slots: PreloadedSlots) -> None:
    """Let the mask rows of a model see these slots, whose sizes are the model's; they are stored in its type."""
    gate = gate_of(model, mask_ids)
    owners = attention_modules(model)
    layers = len(slots.keys)
    if sorted(owners) != list(range(layers)):
        raise UnsupportedModel(
            f"{class_name(model)} has attention with the layer indices {sorted(owners)}: expected 0 to {layers - 1}, as the "
            f"preloaded slots have; {_ADVICE}"
        )
    for layer, modules in owners.items():
        found = LayerSlots(gate, *(tensor[layer].to(model.device, model.dtype) for tensor in slots.tensors))
        for module in modules:
            setattr(module, PRELOADED_SLOTS, found)


def slots_of(model: PreTrainedModel) -> list[LayerSlots]:
    """The preloaded slots of each layer; empty for a model without."""
    return [module for module in model.modules() if isinstance(module, LayerSlots)]


@contextmanager
def slots_called(model: PreTrainedModel) -> Iterator[None]:
    """Raise at the end of the block unless each layer of a model used its preloaded slots in it."""
    slots, called = slots_of(model), set[int]()
    handles = [found.register_forward_hook(lambda module, arguments, output: called.add(id(module))) for found in slots]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(called) < len(slots):
        raise UnsupportedModel(
            f"{class_name(model)} uses preloaded slots in {len(called)} of {len(slots)} layers: expected all of them; the "
            f"others do not call the attention interface of transformers; {_ADVICE}"
        )


def _text_sums(scaled: Tensor, key: Tensor, mask: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The largest score of each row's visible text, and the sum of exponentials relative to it: B x H x T x 1.

    Scores are computed as key times query, so that graphs do not merge them with those of the text's attention, whose
    operators are then the same as without preloaded slots."""
    batch, heads, rows, dim = scaled.shape
    groups = heads // key.shape[1]
    grouped = scaled.reshape(batch, key.shape[1], groups * rows, dim)
    scores = capped(torch.matmul(key, grouped.transpose(-1, -2)).float(), softcap)  # B x Hkv x A x groups * T
    added = (additive_mask(mask, torch.float32) if mask.dtype == torch.bool else mask.float()).transpose(-1, -2)
    scores = scores + (added.repeat(1, 1, 1, groups) if groups > 1 else added)
    peak = scores.amax(dim=-2, keepdim=True)
    total = torch.exp(scores - peak).sum(dim=-2)
    return peak.reshape(batch, heads, rows, 1), total.reshape(batch, heads, rows, 1)
