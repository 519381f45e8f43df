"""Weight quantization: the weights of linear layers as int4, int8 or float8 codes with scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Embeddings
from spaceport.graphs.contract.signature import Lowering, Weights
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding, quantize_rows
from spaceport.graphs.rotation import Orthogonal
from spaceport.graphs.streamed_weights import ReadRows, replace_values, rows_of, stored_beside
from spaceport.graphs.traits import UnsupportedModel, class_name

# Block sizes of int4 weights: the first that divides a layer's number of inputs is used. TensorRT supports each of
# them, and large blocks are fastest there. On ONNX Runtime's CPU backend, blocks of 16 are the only ones with which the
# result of a row is independent of the number of rows on every x86 CPU; with 32 it is not without AVX512.
BLOCKS: dict[Lowering, tuple[int, ...]] = {"scatter": (16,), "append": (128, 64, 32)}

_INT4 = (-8, 7)
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_LARGEST = torch.finfo(_FLOAT8).max
# Scales that are tried, relative to the one that clips nothing: where few weights of a block are large, a smaller scale
# is better for all others.
_SCALE_FACTORS = tuple(1 - 0.04 * step for step in range(11))


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight of a linear layer: codes and the scales that they are multiplied by."""

    codes: Tensor  # inputs x outputs: int8 (for int4: -8 to 7) or float8_e4m3fn
    scale: Tensor  # in the model's dtype: inputs / block x outputs, or outputs if `block` is None
    block: int | None  # inputs that share a scale; None: one scale per output channel

    @property
    def dequantized(self) -> Tensor:
        """The weight that an engine computes with: inputs x outputs, in the model's dtype."""
        weight, scale = self.codes.to(torch.float32, memory_format=torch.contiguous_format), self.scale.float()
        if self.block is None:
            weight.mul_(scale)
        else:
            weight.view(len(scale), self.block, -1).mul_(scale[:, None])
        return weight.to(self.scale.dtype)

    def of_outputs(self, outputs: slice) -> QuantizedWeight:
        """The part of the weight that computes these outputs."""
        return replace(self, codes=self.codes[:, outputs], scale=self.scale[..., outputs])


@dataclass(frozen=True)
class Quantization:
    """The quantized parts of a model."""

    weights: Weights = "same"
    layers: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # by the names of the linear modules
    integers: IntegerModel | None = None  # for int8 activations with int8 weights; `layers` is then empty
    embedding: QuantizedEmbedding | None = None  # input embedding, if `layers` contains the output embedding
    rotation: Orthogonal | None = None  # of the residual stream, which the weights of `integers` are for
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
            errors[name] = replace_weight(module.weight, linear_rows(quantized))
    if not layers:
        raise OptionFault(
            f"weights is {weights}: {class_name(model)} has no linear layer that can be quantized (expected a number of "
            f"inputs divisible by {' or '.join(map(str, BLOCKS[lowering]))}): export it unquantized (--weights same)"
        )
    return Quantization(weights, layers, errors=errors)


def quantize_weight(weight: Tensor, weights: Weights, blocks: Sequence[int]) -> QuantizedWeight | None:
    """A quantized weight (given as outputs x inputs); None if no block size divides its number of inputs."""
    block = next((block for block in blocks if weight.shape[1] % block == 0), None) if weights == "int4" else None
    if weights == "int4" and block is None:
        return None
    outputs, inputs = weight.shape
    codes = torch.empty((inputs, outputs), dtype=_FLOAT8 if weights == "float8" else torch.int8)
    scale = torch.empty(outputs if block is None else (inputs // block, outputs), dtype=weight.dtype)
    for rows, values in rows_of(weight):
        some_codes, some_scales = _quantized_rows(values, weights, block)
        codes[:, rows] = some_codes.T
        scale[..., rows] = some_scales if block is None else some_scales.T
    return QuantizedWeight(stored_beside(weight, codes), stored_beside(weight, scale), block)


def _quantized_rows(rows: Tensor, weights: Weights, block: int | None) -> tuple[Tensor, Tensor]:
    """Codes (outputs x inputs) and scales (outputs, or outputs x inputs / block) for the weights of some outputs."""
    if not bool(torch.isfinite(rows).all()):
        raise InputFault("its weight holds infinities or NaN: save the checkpoint again, or export it in float32")
    if block is not None:
        codes, scale = _int4_rows(rows.float().reshape(len(rows), -1, block), rows.dtype)
        return codes.flatten(1), scale
    if weights == "float8":
        return _float8_rows(rows)
    codes, scale = quantize_rows(rows)
    return codes, _stored_scale(scale, rows.dtype)


def linear_rows(layer: QuantizedWeight | IntegerLinear) -> ReadRows:
    """The dequantized weight of a linear module, outputs x inputs, for some outputs."""
    return lambda outputs: layer.of_outputs(outputs).dequantized.T


def replace_weight(weight: Tensor, dequantize: ReadRows) -> float:
    """Replace the values of a weight by its dequantized values; return the relative RMS error."""
    norm = error = 0.0  # squared
    for rows, values in rows_of(weight):
        norm += float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2
        error += float(torch.linalg.vector_norm(dequantize(rows).float().sub_(values))) ** 2
    replace_values(weight, dequantize)
    return math.sqrt(error / norm) if norm else 0.0


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


def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _stored_scale(rows.float().abs().amax(dim=1) / _FLOAT8_LARGEST, rows.dtype)
    return (rows.float() / scale.float()[:, None]).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST).to(_FLOAT8), scale


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
