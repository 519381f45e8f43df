"""Weight quantization: the weights of linear layers as int4, int8 or float8 codes with scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import OptionFault
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

INT4_LIMITS = (-8, 7)
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


def quantize_weights(model: PreTrainedModel, weights: Weights) -> Quantization:
    """Quantize the weights of a model's linear layers in place, one by one: they then hold the dequantized values.

    Embeddings, the output embedding, norms, biases, adapters of mask rows and experts that are not linear modules stay.
    """
    if weights == "same":
        return UNQUANTIZED
    modules = finite_modules(model, linear_modules(model))
    if not modules:
        raise OptionFault(
            f"weights is {weights}: {class_name(model)} has no linear layer that can be quantized: export it unquantized "
            "(--weights same)"
        )
    layers: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}
    for name, module in modules.items():
        layers[name] = nearest_weight(module.weight, weights)
        errors[name] = replace_weight(module.weight, linear_rows(layers[name]))
    return Quantization(weights, layers, errors=errors)


def finite_modules(model: PreTrainedModel, modules: Mapping[str, nn.Linear]) -> Mapping[str, nn.Linear]:
    """These modules; raises if a weight holds infinities or NaN."""
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again, or export it in "
                "float32"
            )
    return modules


def nearest_weight(weight: Tensor, weights: Weights, block: int | None = None) -> QuantizedWeight:
    """The nearest codes of a weight, given as outputs x inputs; int4 has blocks of inputs."""
    outputs, inputs = weight.shape
    codes = torch.empty((inputs, outputs), dtype=_FLOAT8 if weights == "float8" else torch.int8)
    scale = torch.empty(outputs if block is None else (inputs // block, outputs), dtype=weight.dtype)
    for rows, values in rows_of(weight):
        if block is not None:
            some_codes, some_scales = _int4_rows(values.float(), block, values.dtype)
        elif weights == "float8":
            some_codes, some_scales = _float8_rows(values)
        else:
            some_codes, some_scales = quantize_rows(values)
        codes[:, rows] = some_codes.T
        stored = _stored_scale(some_scales, weight.dtype)
        scale[..., rows] = stored if block is None else stored.T
    return QuantizedWeight(stored_beside(weight, codes), stored_beside(weight, scale), block)


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


def block_of(inputs: int, blocks: Sequence[int]) -> int | None:
    """The first block size that divides a number of inputs; None if none does."""
    return next((block for block in blocks if inputs % block == 0), None)


def int4_scales(weight: Tensor, block: int, dtype: torch.dtype, sizes: Tensor | None = None) -> Tensor:
    """The scales of a weight (outputs x inputs) with the smallest squared error in each block: outputs x blocks.

    With the sizes of its inputs, the error is that of the output."""
    lowest, highest = INT4_LIMITS
    blocks = weight.reshape(len(weight), -1, block)
    unclipped = torch.maximum(blocks.amax(dim=-1) / highest, blocks.amin(dim=-1) / lowest)
    best = _stored_scale(unclipped, dtype)
    smallest = torch.full_like(unclipped, torch.inf)
    for factor in _SCALE_FACTORS:
        scale = _stored_scale(unclipped * factor, dtype)
        steps = blocks / scale.float()[..., None]
        difference = steps.round().clamp_(*INT4_LIMITS).sub_(steps)
        if sizes is not None:
            difference.mul_(sizes.view(-1, block))
        error = difference.square_().sum(dim=-1) * scale.float() ** 2
        best = torch.where(error < smallest, scale, best)
        smallest = torch.minimum(error, smallest)
    return best


def _int4_rows(rows: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest codes (outputs x inputs) and scales (outputs x blocks) of some outputs."""
    scale = int4_scales(rows, block, dtype)
    return (rows / scale.float().repeat_interleave(block, 1)).round_().clamp_(*INT4_LIMITS).to(torch.int8), scale


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the dtype in which the graph stores them: never 0 or subnormal, since weights are divided by them and
    some engines flush subnormal numbers to 0."""
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype)
