"""Attention over 8-bit keys and values whose result does not depend on the order of the KV slots.

Sums of products are sums of integers, so a row's result is a function of the set of slots that it sees: slots may lie in
any order, and other rows and other requests change nothing. Everything else is computed for each value by itself.

Keys, values and queries have static scales, one for each KV head. Queries and keys are rotated before they are rounded,
which spreads outliers and leaves scores as they are; keys are relative to their mean on calibration texts, which moves
all scores of a row equally. Probabilities are fixed-point numbers of 14 bits in two limbs of 7, so that two products fit
into 16 bits: the 8-bit kernels of CPUs without VNNI add products in pairs. Products of queries and keys are added in
fixed pairs of channels, so that even a sum that is cut off there is the same in every order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic, symbolic_multi_out
from transformers import AttentionInterface, PreTrainedModel

from spaceport.graphs.attention import (
    INTEGER_ATTENTION,
    UnsupportedAttention,
    attention_modules,
    capped,
    grouped_attention,
    refuse_unknown,
)
from spaceport.graphs.quantization import INT8_MAX, ZERO_POINT, AttentionScales
from spaceport.graphs.rotation import block_size, hadamard, orthogonal
from spaceport.graphs.traits import UnsupportedModel, class_name

_RECORDING = "spaceport-recording"
_KEY_ROOM = 1.1  # the largest key relative to that of the calibration texts: larger ones are cut off

_LIMB = 128  # steps of the low limb of a probability in one step of the high limb
# The logarithm of the largest probability before it is rounded down: a little less than `_LIMB`.
_LARGEST = math.log(_LIMB - 0.1)


class IntegerAttention(nn.Module):
    """The attention of a layer over 8-bit keys and values."""

    rotation: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    center: Tensor

    def __init__(self, scales: AttentionScales, rotation: Tensor) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation, persistent=False)
        for name in ("queries", "keys", "values"):
            self.register_buffer(name, getattr(scales, name), persistent=False)
        self.register_buffer("center", scales.center[None, :, None], persistent=False)

    def stored_keys(self, states: Tensor) -> Tensor:
        """Keys as the KV cache stores them: B x Hkv x T x D, int8."""
        return _quantized(torch.matmul(states, self.rotation) - self.center, self.keys, 0)

    def stored_values(self, states: Tensor) -> Tensor:
        """Values as the KV cache stores them: B x Hkv x T x D, int8."""
        return _quantized(states, self.values, 0)

    def forward(
        self,
        query: Tensor,  # B x H x T x D
        key: Tensor,  # B x Hkv x A x D, int8
        value: Tensor,  # B x Hkv x A x D, int8
        mask: Tensor,  # B x 1 x T x A, additive
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """The attention output of every row: B x H x T x D."""
        batch, heads, rows, dim = query.shape
        groups = heads // key.shape[1]
        grouped = torch.matmul(query, self.rotation).reshape(batch, key.shape[1], groups * rows, dim)
        products = _product(_quantized(grouped, self.queries, ZERO_POINT), ZERO_POINT, key.transpose(-1, -2))
        scores = capped(_dequantized(products, self.queries * self.keys * scale), softcap)
        scores = scores + (mask.repeat(1, 1, groups, 1) if groups > 1 else mask)
        weights = torch.exp(scores - (scores.amax(dim=-1, keepdim=True) - _LARGEST))
        high_limb = weights.to(torch.uint8)  # rounds down, and takes less time than Floor
        high = high_limb.float()
        low_limb = ((weights - high) * _LIMB).to(torch.uint8)
        sums = _dequantized(_product(torch.cat((high_limb, low_limb), dim=2), 0, value), self.values)
        total = high.sum(dim=-1, keepdim=True) * _LIMB + low_limb.float().sum(dim=-1, keepdim=True)
        high_sums, low_sums = _halves(sums)
        return ((high_sums * _LIMB + low_sums) / total).reshape(batch, heads, rows, dim)


def use_integer_attention(model: PreTrainedModel, scales: Sequence[AttentionScales]) -> tuple[IntegerAttention, ...]:
    """Let the layers of a model attend to 8-bit keys and values; returns what they attend with."""
    rotation = _rotation(scales[0].center.shape[-1])
    attentions = tuple(IntegerAttention(layer, rotation).to(model.device, model.dtype) for layer in scales)
    for layer, modules in attention_modules(model).items():
        for module in modules:
            setattr(module, INTEGER_ATTENTION, attentions[layer])
    return attentions


def is_quantizable(model: PreTrainedModel) -> bool:
    """Whether the attention of a model can be computed over 8-bit keys and values; the model may be without values."""
    return bool(model._can_set_attn_implementation())


class AttentionRecorder:
    """Measures what the attention of a model's layers sees of calibration texts."""

    def __init__(self, real: Tensor) -> None:
        self._real = real  # batch x tokens, bool; False: padding
        self._measures = False
        self.scales: list[AttentionScales] = []

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Replace the attention of a model inside the block, where masks have 4 dimensions."""
        previous = model.config._attn_implementation
        AttentionInterface.register(_RECORDING, self._attention)
        model.set_attn_implementation(_RECORDING)
        try:
            yield
        except UnsupportedAttention as error:
            raise UnsupportedModel(f"{class_name(model)} cannot be exported: {error}") from error
        finally:
            model.set_attn_implementation(previous)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the layer that runs inside the block."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # None: causal
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        refuse_unknown(arguments)
        if self._measures:
            self.scales.append(self._measured(query, key, value, softcap))
        if attention_mask is None:
            attention_mask = torch.ones(query.shape[-2:-1] * 2, dtype=torch.bool).tril()[None, None]
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return grouped_attention(query, key, value, attention_mask, scale, softcap).transpose(1, 2).contiguous(), None

    def _measured(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> AttentionScales:
        rotation = _rotation(key.shape[-1]).to(key)
        heads = key.shape[1]
        queries, keys, values = (
            states.transpose(1, 2)[self._real].reshape(-1, heads, states.shape[1] // heads, states.shape[-1])
            for states in (torch.matmul(query, rotation), torch.matmul(key, rotation), value)
        )  # tokens x KV heads x query heads of each x head size
        center = keys.mean(dim=(0, 2)) if softcap is None else torch.zeros_like(keys[0, :, 0])
        largest = [states.abs().amax(dim=(0, 2, 3)) for states in (queries, keys - center[:, None], values)]
        steps = (size.clamp(min=1e-6) / INT8_MAX for size in (largest[0], largest[1] * _KEY_ROOM, largest[2]))
        return AttentionScales(*(tensor.float().cpu() for tensor in (*steps, center)))


def _rotation(size: int) -> Tensor:
    return (hadamard(size) if block_size(size, size) == size else orthogonal(size).matrix).float()


def _quantized(states: Tensor, steps: Tensor, zero: int) -> Tensor:
    """States (B x Hkv x T x D) in 8 bits: int8, or uint8 with a zero point."""
    dtype = torch.uint8 if zero else torch.int8
    if torch.onnx.is_in_onnx_export():
        zeros = torch.full_like(steps, zero, dtype=dtype)
        return symbolic("QuantizeLinear", (states, steps, zeros), {"axis": 1}, dtype=dtype, shape=states.shape)
    codes = (states / steps[:, None, None]).round() + zero
    return codes.clamp(zero - ZERO_POINT, zero + INT8_MAX).to(dtype)


def _product(codes: Tensor, zero: int, others: Tensor) -> Tensor:
    """The product of uint8 codes with a zero point and int8 codes: int32."""
    shape = (*codes.shape[:-1], others.shape[-1])
    if torch.onnx.is_in_onnx_export():
        zeros = (torch.tensor(zero, dtype=codes.dtype), torch.tensor(0, dtype=others.dtype))
        return symbolic("MatMulInteger", (codes, others, *zeros), dtype=torch.int32, shape=shape)
    return torch.matmul(codes.double() - zero, others.double()).to(torch.int32)


def _dequantized(products: Tensor, steps: Tensor) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        inputs = (products, steps)
        return symbolic("DequantizeLinear", inputs, {"axis": 1}, dtype=torch.float32, shape=products.shape)
    return products.float() * steps[:, None, None]


def _halves(limbs: Tensor) -> Sequence[Tensor]:
    """The first and the second half of the rows."""
    batch, heads, rows, dim = limbs.shape
    if torch.onnx.is_in_onnx_export():
        shapes = [(batch, heads, rows // 2, dim)] * 2
        attributes: dict[str, Any] = {"axis": 2, "num_outputs": 2}
        return symbolic_multi_out("Split", (limbs,), attributes, dtypes=[limbs.dtype] * 2, shapes=shapes)
    return limbs.chunk(2, dim=2)
