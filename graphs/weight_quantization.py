"""Precision: the weights of linear layers rounded to few bits, as small numbers and the scales that they are multiplied by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Embeddings
from spaceport.graphs.contract.signature import Lowering, Weights
from spaceport.graphs.int8 import IntegerModel, QuantizedEmbedding, quantize_rows
from spaceport.graphs.traits import UnsupportedModel, name_of

# Inputs that share a scale in int4: the first of these that divides a layer's inputs. TensorRT takes each of them, and long
# ones cost it least. On ONNX Runtime's CPU backend short ones cost nothing; they are nearer to the model, and the sums of a
# row do not depend on the number of rows where its activations are rounded to int8.
BLOCKS: dict[Lowering, tuple[int, ...]] = {"scatter": (32, 16), "append": (128, 64, 32)}

_INT4 = (-8, 7)
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_LARGEST = torch.finfo(_FLOAT8).max
# Scales that are tried, as shares of the one that cuts nothing off: where few weights stick out of a block, a smaller
# one is better for all others.
_SHARES = tuple(1 - 0.04 * step for step in range(11))
_AT_ONCE = 1 << 18  # weights whose scales are searched together: their passes stay in the processor's caches


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A linear layer's weight: each value is the product of a small number and a scale, rounded to the model's type."""

    codes: Tensor  # inputs x outputs: int8 (of int4: -8 to 7) or float8_e4m3fn
    scale: Tensor  # in the model's type; inputs / block x outputs, or outputs alone where a column has one scale
    block: int | None  # inputs that share a scale; nothing: all of a column do

    @property
    def values(self) -> Tensor:
        """The weight that an engine multiplies by: inputs x outputs, in the model's type."""
        scale = self.scale.float()
        if self.block is not None:
            scale = scale.repeat_interleave(self.block, dim=0)
        return (self.codes.float() * scale).to(self.scale.dtype)


@dataclass(frozen=True)
class Quantization:
    """What was rounded of a model."""

    weights: Weights = "same"
    layers: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # by the names of the linear modules
    integers: IntegerModel | None = None  # products whose inputs are integers too, instead of layers
    table: QuantizedEmbedding | None = None  # the input embedding of a model whose output embedding is among the layers

    extra_embedding_weights: int = 0  # weights that the two embeddings shared before they were rounded apart

    @property
    def quantized_weights(self) -> int:
        """How many weights have few bits."""
        integers = 0 if self.integers is None else self.integers.weights
        table = 0 if self.table is None else self.table.codes.numel()
        return integers + table + sum(layer.codes.numel() for layer in self.layers.values())

    @property
    def embeddings(self) -> Embeddings:
        """How the output embedding is stored; the input embedding is then in int8."""
        if self.table is not None:
            return "int4"
        return "same" if self.integers is None else "int8"


UNQUANTIZED = Quantization()


def quantize_weights(model: PreTrainedModel, weights: Weights, lowering: Lowering) -> Quantization:
    """Round the weights of a model's linear layers, which from here on reckons with what the engines will.

    Embeddings, the output embedding, norms, biases, adapters of mask rows and experts that are no linear modules stay.
    """
    if weights == "same":
        return UNQUANTIZED
    layers = {}
    for name, module in linear_modules(model).items():
        try:
            rounded = quantize_weight(module.weight, weights, BLOCKS[lowering])
        except InputFault as error:
            raise UnsupportedModel(f"{name_of(model)}, {name}: {error}") from error
        if rounded is not None:
            layers[name] = rounded
            module.weight.data.copy_(rounded.values.T)
    if not layers:
        raise OptionFault(
            f"weights is {weights}: {name_of(model)} has no linear layer that could be rounded (expected a number of inputs "
            f"that {' or '.join(map(str, BLOCKS[lowering]))} divides): export it with weights as they are (--weights same)"
        )
    return Quantization(weights, layers)


def quantize_weight(weight: Tensor, weights: Weights, blocks: Sequence[int]) -> QuantizedWeight | None:
    """A weight (outputs x inputs) rounded; nothing where its inputs cannot be cut into blocks."""
    if not bool(torch.isfinite(weight).all()):
        raise InputFault("its weight holds infinities or NaN: save the checkpoint again, or export it in float32")
    if weights == "float8":
        return _float8(weight.detach())
    if weights == "int8":
        codes, scale = quantize_rows(weight.detach())
        return QuantizedWeight(codes.T.contiguous(), _scale(scale, weight.dtype), None)
    block = next((block for block in blocks if weight.shape[1] % block == 0), None)
    return None if block is None else _int4(weight.detach(), block)


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The modules whose weight is used for one product and nothing else, by name."""
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)  # of any kind: if it does more with its weight, the graph will show it
        and module is not model.get_output_embeddings()
        and places[id(module.weight)] == 1
    }


def _float8(weight: Tensor) -> QuantizedWeight:
    columns = weight.T.float()  # inputs x outputs
    scale = _scale(columns.abs().amax(dim=0) / _FLOAT8_LARGEST, weight.dtype)
    codes = (columns / scale.float()).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST).to(_FLOAT8)
    return QuantizedWeight(codes.contiguous(), scale, None)


def _int4(weight: Tensor, block: int) -> QuantizedWeight:
    some = max(1, _AT_ONCE // weight.shape[1])  # outputs
    parts = [_int4_rows(rows.float().reshape(len(rows), -1, block), weight.dtype) for rows in torch.split(weight, some)]
    codes, scale = (torch.cat(kind).flatten(1).T.contiguous() for kind in zip(*parts, strict=True))
    return QuantizedWeight(codes, scale, block)


def _int4_rows(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes and scales of outputs x blocks x block that make the smallest sum of squared errors in each block."""
    least, most = _INT4
    whole = torch.maximum(blocks.amax(dim=-1) / most, blocks.amin(dim=-1) / least)  # cuts nothing off
    best = _scale(whole, dtype)
    smallest = torch.full_like(whole, torch.inf)
    for share in _SHARES:
        scale = _scale(whole * share, dtype)
        steps = blocks / scale.float()[..., None]
        error = steps.round().clamp_(*_INT4).sub_(steps).square_().sum(dim=-1) * scale.float() ** 2
        best = torch.where(error < smallest, scale, best)
        smallest = torch.minimum(error, smallest)
    return (blocks / best.float()[..., None]).round_().clamp_(*_INT4).to(torch.int8), best


def _scale(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as the graph holds them: never 0, since weights are divided by them, nor so small that engines drop bits."""
    return wanted.clamp(min=torch.finfo(dtype).tiny).to(dtype)
