"""Preloaded slots: key/value pairs that only mask rows see.

The slots are constants of the graph, beside the KV buffers. A mask row attends to the visible text and to all slots of its
layer in one softmax, which is computed in two parts: the attention to the text, as every row has it, and that to the slots.
The parts are merged by the sums of their exponentials. Other rows get the attention to the text bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.graphs.attention import PRELOADED_SLOTS, additive_mask, attention_modules, capped, hooked
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.gated import Gate, gate_of
from spaceport.graphs.mechanism import Mechanism, MechanismError, is_finite, wrong_shapes
from spaceport.graphs.traits import UnsupportedModel, class_name

_ADVICE = "export the model without them: remove preloaded_slots from sar_config.json"


@dataclass(frozen=True, eq=False)
class PreloadedSlots(Mechanism):
    """The slots of all layers. H' is the number of KV heads, or a multiple of it up to that of query heads."""

    name: ClassVar[str] = PRELOADED_SLOTS
    needs_mask_token: ClassVar[bool | None] = True
    replaces_attention: ClassVar[bool] = True

    keys: Tensor  # layers x H' x slots x D, after the rotary embedding
    values: Tensor  # layers x H' x slots x D

    @property
    def count(self) -> int:
        """The number of slots."""
        return int(self.keys.shape[2])

    @property
    def entry(self) -> dict[str, Any]:
        return {"slots": self.count}

    def state(self) -> Mapping[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> PreloadedSlots:
        count = entry.exactly("slots")["slots"].whole(1)
        if tensors.keys() != {"keys", "values"} or any(tensor.shape[2:3] != (count,) for tensor in tensors.values()):
            raise wrong_shapes(tensors, f"keys and values with {count} slots")
        return cls(tensors["keys"], tensors["values"])

    def check(self, config: PreTrainedConfig) -> None:
        text = config.get_text_config()
        queries = int(text.num_attention_heads)
        heads = sorted({int(getattr(text, "num_key_value_heads", None) or queries), queries})
        dim = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
        shape, expected = tuple(self.keys.shape), [text.num_hidden_layers, " or ".join(map(str, heads)), "slots", dim]
        fits = len(shape) == 4 and shape[0] == expected[0] and shape[1] in heads and shape[2] > 0 and shape[3] == dim
        if not fits or self.values.shape != shape:
            raise MechanismError(
                f"has keys of shape {shape} and values of shape {tuple(self.values.shape)}: expected "
                f"{' x '.join(map(str, expected))} for both, which are layers, heads, slots and head size of the model"
            )

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int]) -> None:
        """Let the mask rows of a model see these slots, which are stored in its type."""
        if not all(is_finite(tensor.to(model.dtype)) for tensor in self.state().values()):
            raise MechanismError(
                f"has numbers beyond the range of {str(model.dtype).removeprefix('torch.')}: expected --dtype "
                "bfloat16 or float32"
            )
        gate, owners, layers = gate_of(model, mask_ids), attention_modules(model), len(self.keys)
        if sorted(owners) != list(range(layers)):
            raise UnsupportedModel(
                f"{class_name(model)} has attention with the layer indices {sorted(owners)}: expected 0 to "
                f"{layers - 1}, as the preloaded slots have"
            )
        for layer, modules in owners.items():
            keys, values = (tensor[layer].to(model.device, model.dtype) for tensor in (self.keys, self.values))
            layer_slots = LayerSlots(gate, keys, values)
            for module in modules:
                setattr(module, PRELOADED_SLOTS, layer_slots)


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


def slots_of(model: PreTrainedModel) -> list[LayerSlots]:
    """The preloaded slots of each layer; empty for a model without."""
    return [module for module in model.modules() if isinstance(module, LayerSlots)]


@contextmanager
def slots_called(model: PreTrainedModel) -> Iterator[None]:
    """Raise at the end of the block unless each layer of a model used its preloaded slots in it."""
    slots, called = slots_of(model), set[int]()
    handles = [layer.register_forward_hook(lambda module, arguments, output: called.add(id(module))) for layer in slots]
    with hooked(handles):
        yield
    if len(called) < len(slots):
        raise UnsupportedModel(
            f"{class_name(model)} uses preloaded slots in {len(called)} of {len(slots)} layers: expected all of them; "
            f"the others do not call the attention interface of transformers; {_ADVICE}"
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
