"""Weight quantization: the weights of linear layers as int4, int8 or float8 codes with scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Embeddings
from spaceport.graphs.contract.signature import Lowering, Weights
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding, quantize_rows
from spaceport.graphs.streamed_weights import replace_values, stored_beside, values_of
from spaceport.graphs.traits import UnsupportedModel, class_name

# Block sizes of int4 weights: the first that divides a layer's number of inputs is used. TensorRT supports each of
# them, and large blocks are fastest there. On ONNX Runtime's CPU backend small blocks cost nothing and are more
# accurate; with int8 activations they also keep the result of a row independent of the number of rows.
BLOCKS: dict[Lowering, tuple[int, ...]] = {"scatter": (32, 16), "append": (128, 64, 32)}

_INT4 = (-8, 7)
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_LARGEST = torch.finfo(_FLOAT8).max
# Scales that are tried, relative to the one that clips nothing: where few weights of a block are large, a smaller scale
# is better for all others.
_SCALE_FACTORS = tuple(1 - 0.04 * step for step in range(11))
_SEARCH_CHUNK = 1 << 18  # weights whose scales are searched together: the arrays stay in the CPU's caches


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight of a linear layer: codes and the scales that they are multiplied by."""

    codes: Tensor  # inputs x outputs: int8 (for int4: -8 to 7) or float8_e4m3fn
    scale: Tensor  # in the model's dtype: inputs / block x outputs, or outputs if `block` is None
    block: int | None  # inputs that share a scale; None: one scale per output channel

    @property
    def dequantized(self) -> Tensor:
        """The weight that an engine computes with: inputs x outputs, in the model's dtype."""
        scale = self.scale.float()
        if self.block is not None:
            scale = scale.repeat_interleave(self.block, dim=0)
        return self.codes.float().mul_(scale).to(self.scale.dtype)


@dataclass(frozen=True)
class Quantization:
    """The quantized parts of a model."""

    weights: Weights = "same"
    layers: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # by the names of the linear modules
    integers: IntegerModel | None = None  # for int8 activations with int8 weights; `layers` is then empty
    embedding: QuantizedEmbedding | None = None  # input embedding, if `layers` contains the output embedding
    untied_weights: int = 0  # weights that the two embeddings shared before they were quantized separately
    errors: Mapping[str, float] = field(default_factory=dict)  # relative RMS error of each quantized weight, by name

    @property
    def quantized_weights(self) -> int:
        """Number of weights that are quantized."""
        integers = 0 if self.integers is None else self.integers.weights
        embedding = 0 if self.embedding is None else self.embedding.codes.numel()
        return integers + embedding + sum(layer.codes.numel() for layer in self.layers.values())

    @property
    def embeddings(self) -> Embeddings:
        """How the output embedding is stored; unless it is "same", the input embedding is stored in int8."""
        if self.embedding is not None:
            return "int4"
        return "same" if self.integers is None else "int8"


UNQUANTIZED = Quantization()


def quantize_weights(model: PreTrainedModel, weights: Weights, lowering: Lowering) -> Quantization:
    """Quantize the weights of a model's linear layers in place: they then hold the dequantized values.

    Embeddings, the output embedding, norms, biases, adapters of mask rows and experts that are not linear modules stay.
    """
    if weights == "same":
        return UNQUANTIZED
    layers: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}
    for name, module in linear_modules(model).items():
        try:
            quantized = quantize_weight(module.weight, weights, BLOCKS[lowering])
        except InputFault as error:
            raise UnsupportedModel(f"{class_name(model)}, {name}: {error}") from error
        if quantized is not None:
            layers[name] = quantized
            errors[name] = replace_weight(module.weight, partial(linear_weight, quantized))
    if not layers:
        raise OptionFault(
            f"weights is {weights}: {class_name(model)} has no linear layer that can be quantized (expected a number of "
            f"inputs divisible by {' or '.join(map(str, BLOCKS[lowering]))}): export it unquantized (--weights same)"
        )
    return Quantization(weights, layers, errors=errors)


def quantize_weight(weight: Tensor, weights: Weights, blocks: Sequence[int]) -> QuantizedWeight | None:
    """A quantized weight (given as outputs x inputs); None if no block size divides its number of inputs."""
    found = _quantized(values_of(weight), weights, blocks)
    if found is None:
        return None
    return replace(found, codes=stored_beside(weight, found.codes), scale=stored_beside(weight, found.scale))


def _quantized(weight: Tensor, weights: Weights, blocks: Sequence[int]) -> QuantizedWeight | None:
    if not bool(torch.isfinite(weight).all()):
        raise InputFault("its weight holds infinities or NaN: save the checkpoint again, or export it in float32")
    if weights == "float8":
        return _float8(weight)
    if weights == "int8":
        codes, scale = quantize_rows(weight)
        return QuantizedWeight(codes.T.contiguous(), _stored_scale(scale, weight.dtype), None)
    block = next((block for block in blocks if weight.shape[1] % block == 0), None)
    return None if block is None else _int4(weight, block)


def linear_weight(layer: QuantizedWeight | IntegerLinear) -> Tensor:
    """The dequantized weight of a linear module, outputs x inputs."""
    return layer.dequantized.T


def replace_weight(weight: Tensor, dequantize: Callable[[], Tensor]) -> float:
    """Replace the values of a weight by its dequantized values; return the relative RMS error."""
    values, difference = values_of(weight), dequantize().float()
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(difference.sub_(values)))
    replace_values(weight, dequantize)
    return error / norm if norm else 0.0


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear modules whose weight is not shared with another module, by name; without the output embedding."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)  # also subclasses: if one uses its weight in another way, the export fails
        and module is not model.get_output_embeddings()
        and uses[id(module.weight)] == 1
    }


def _float8(weight: Tensor) -> QuantizedWeight:
    columns = weight.T.float()  # inputs x outputs
    scale = _stored_scale(columns.abs().amax(dim=0) / _FLOAT8_LARGEST, weight.dtype)
    codes = (columns / scale.float()).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST).to(_FLOAT8)
    return QuantizedWeight(codes.contiguous(), scale, None)


def _int4(weight: Tensor, block: int) -> QuantizedWeight:
    chunk = max(1, _SEARCH_CHUNK // weight.shape[1])  # outputs
    parts = [
        _int4_rows(rows.float().reshape(len(rows), -1, block), weight.dtype) for rows in torch.split(weight, chunk)
    ]
    codes, scale = (torch.cat(kind).flatten(1).T.contiguous() for kind in zip(*parts, strict=True))
    return QuantizedWeight(codes, scale, block)


def _int4_rows(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales for outputs x blocks x block with the smallest sum of squared errors in each block."""
    lowest, highest = _INT4
    unclipped = torch.maximum(blocks.amax(dim=-1) / highest, blocks.amin(dim=-1) / lowest)
    best = _stored_scale(unclipped, dtype)
    smallest = torch.full_like(unclipped, torch.inf)
    for factor in _SCALE_FACTORS:
        scale = _stored_scale(unclipped * factor, dtype)
        steps = blocks / scale.float()[..., None]
        error = steps.round().clamp_(*_INT4).sub_(steps).square_().sum(dim=-1) * scale.float() ** 2
        best = torch.where(error < smallest, scale, best)
        smallest = torch.minimum(error, smallest)
    return (blocks / best.float()[..., None]).round_().clamp_(*_INT4).to(torch.int8), best


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the dtype in which the graph stores them: never 0 or subnormal, since weights are divided by them and
    some engines flush subnormal numbers to 0."""
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype)
