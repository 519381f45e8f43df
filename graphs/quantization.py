"""Weights of linear layers in fewer bits: PyTorch computes with the same numbers as the engines of a quantized model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import Weights
from spaceport.graphs.streamed_weights import ReadRows, replace_values, rows_of, stored_beside
from spaceport.graphs.traits import UnsupportedModel, class_name

INT8_MAX = 127  # largest magnitude of an 8-bit weight or input

# Block sizes of int4 weights: the first that divides a layer's number of inputs is used. TensorRT supports each of
# them, and large blocks are fastest there.
BLOCKS = (128, 64, 32)

INPUT_BLOCK = 32  # inputs of a product that are rounded with one scale, as the kernels do
_SMALLEST = 1e-30  # largest magnitude of a block below which its inputs become 0

_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight of a linear layer: codes times scales."""

    codes: Tensor  # inputs x outputs: int8 (for int4: -8 to 7) or float8_e4m3fn
    scale: Tensor  # inputs / block x outputs, or outputs if `block` is None
    block: int | None = None  # inputs that share a scale; None: one scale per output channel

    @property
    def dequantized(self) -> Tensor:
        """The weight that an engine computes with: inputs x outputs, in the type of the scales."""
        scale = self.scale.float()
        if self.block is None:
            return self.codes.float().mul_(scale).to(self.scale.dtype)
        weight = self.codes.to(torch.float32, memory_format=torch.contiguous_format)
        weight.view(len(scale), self.block, -1).mul_(scale[:, None])
        return weight.to(self.scale.dtype)

    def of_outputs(self, outputs: slice) -> Tensor:
        """The dequantized weight of some outputs as a linear module has it: outputs x inputs."""
        return replace(self, codes=self.codes[:, outputs], scale=self.scale[..., outputs]).dequantized.T


@dataclass(frozen=True)
class Quantization:
    """The quantized weights of a model."""

    weights: Weights = "same"
    layers: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # by the names of the linear modules
    errors: Mapping[str, float] = field(default_factory=dict)  # relative RMS error of each quantized weight, by name

    @property
    def quantized_weights(self) -> int:
        """Number of weights that are quantized."""
        return sum(layer.codes.numel() for layer in self.layers.values())


UNQUANTIZED = Quantization()


@dataclass(frozen=True)
class WeightFormat:
    """A range of codes, with one scale for each block of inputs of an output channel, or for the whole channel.

    Scales are never 0 or subnormal, since weights are divided by them and some engines flush subnormal numbers to 0."""

    limits: tuple[float, float]  # lowest and highest code
    scale_dtype: torch.dtype
    # Scales that are tried, relative to the one that clips nothing: where few weights are large, a smaller scale is
    # better for all others.
    factors: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()  # block sizes, see `block_of`; empty: one scale per output channel
    code_dtype: torch.dtype = torch.int8

    def nearest(self, weight: Tensor) -> QuantizedWeight:
        """A weight (outputs x inputs) with the nearest codes."""
        outputs, inputs = weight.shape
        block = block_of(inputs, self.blocks)
        codes = torch.empty((inputs, outputs), dtype=self.code_dtype)
        scale = torch.empty((inputs // (block or inputs), outputs), dtype=self.scale_dtype)
        for rows, values in rows_of(weight):
            scales = self._best_scales(values.float())
            steps = values.float() / scales.float().repeat_interleave(values.shape[1] // scales.shape[1], 1)
            codes[:, rows], scale[:, rows] = self._rounded(steps).to(self.code_dtype).T, scales.T
        stored = stored_beside(weight, codes), stored_beside(weight, scale[0] if block is None else scale)
        return QuantizedWeight(*stored, block)

    def _best_scales(self, rows: Tensor) -> Tensor:
        """The scales (rows x blocks) with the smallest squared error in each block."""
        lowest, highest = self.limits
        block = block_of(rows.shape[1], self.blocks) or rows.shape[1]
        values = rows.reshape(len(rows), -1, block)
        unclipped = torch.maximum(values.amax(dim=-1) / highest, values.amin(dim=-1) / lowest)
        best, least = self._stored(unclipped), torch.full_like(unclipped, torch.inf)
        for factor in self.factors:
            scale = self._stored(unclipped * factor)
            steps = values / scale.float()[..., None]
            difference = self._rounded(steps.clone()).sub_(steps)
            error = difference.square_().sum(dim=-1) * scale.float() ** 2
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        return best

    def _rounded(self, steps: Tensor) -> Tensor:
        """Weights that were divided by their scales, rounded in place."""
        return (steps.round_() if self.code_dtype == torch.int8 else steps).clamp_(*self.limits)

    def _stored(self, scale: Tensor) -> Tensor:
        return scale.clamp(min=torch.finfo(self.scale_dtype).tiny).to(self.scale_dtype)


def weight_format(weights: Weights, dtype: torch.dtype) -> WeightFormat:
    """Codes with scales of this type: of int4 one in each block; of int8 and float8 one per output, which clips nothing."""
    if weights == "int4":
        return WeightFormat((-8, 7), dtype, tuple(1 - 0.04 * step for step in range(11)), BLOCKS)
    if weights == "float8":
        return WeightFormat((-_FLOAT8_MAX, _FLOAT8_MAX), dtype, code_dtype=_FLOAT8)
    return WeightFormat((-INT8_MAX, INT8_MAX), dtype)


def block_of(inputs: int, blocks: Sequence[int]) -> int | None:
    """The first block size that divides a number of inputs; None if none does."""
    return next((block for block in blocks if inputs % block == 0), None)


def replace_weight(weight: Tensor, dequantize: ReadRows) -> float:
    """Replace the values of a weight by its dequantized values; return the relative RMS error."""
    norm = error = 0.0  # squared
    for rows, values in rows_of(weight):
        norm += float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2
        error += float(torch.linalg.vector_norm(dequantize(rows).float().sub_(values))) ** 2
    replace_values(weight, dequantize)
    return math.sqrt(error / norm) if norm else 0.0


def fake_quantize(states: Tensor, paired: bool = False) -> Tensor:
    """The inputs of products (last axis: channels) rounded to 8 bits in blocks, as the kernels round them.

    Blocks are twice as long for weights in pairs of blocks."""
    channels = states.shape[-1]
    block = 2 * INPUT_BLOCK if paired and channels % (2 * INPUT_BLOCK) == 0 else INPUT_BLOCK
    blocks = nn.functional.pad(states, (0, -channels % block))
    blocks = blocks.reshape(*states.shape[:-1], -1, block)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    codes = (blocks * (INT8_MAX / largest.clamp(min=_SMALLEST))).round()
    rounded = torch.where(largest <= _SMALLEST, torch.zeros_like(codes), codes * (largest / INT8_MAX))
    return rounded.flatten(-2)[..., :channels]


@torch.no_grad()
def quantize_model(model: PreTrainedModel, weights: Weights) -> Quantization:
    """Quantize the weights of a model's linear layers in place: they then hold the dequantized values.

    Embeddings, norms, biases, adapters of mask rows and experts that are not linear modules stay. Scales of int4 weights
    are those with the smallest error in each block."""
    if weights == "same":
        return UNQUANTIZED
    modules = quantizable_modules(model, weights)
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again, or export it in "
                "float32"
            )
    form = weight_format(weights, model.dtype)
    layers = {name: form.nearest(module.weight) for name, module in modules.items()}
    errors = {name: replace_weight(module.weight, layers[name].of_outputs) for name, module in modules.items()}
    return Quantization(weights, layers, errors)


def quantizable_modules(model: PreTrainedModel, weights: Weights) -> dict[str, nn.Linear]:
    """The linear modules that are quantized, by name; raises if there are none. The model may be without values."""
    block = min(BLOCKS) if weights == "int4" else 1  # which divides all others
    modules = {name: module for name, module in linear_modules(model).items() if module.in_features % block == 0}
    if not modules:
        expected = f" (expected a number of inputs divisible by {' or '.join(map(str, BLOCKS))})"
        raise OptionFault(
            f"weights are {weights}: {class_name(model)} has no linear layer that can be quantized"
            f"{expected if weights == 'int4' else ''}: export it unquantized (--format float16)"
        )
    return modules


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear modules whose weight is not shared with another module, by name; without the output embedding."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)  # also subclasses: if one uses its weight in another way, the export fails
        and module is not model.get_output_embeddings()
        and uses[id(module.weight)] == 1
    }


def expert_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of experts in a module (experts x outputs x inputs), by name."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[2] in ("gate_up_proj", "down_proj") and parameter.dim() == 3
    }


def quantize_inputs(model: PreTrainedModel, weights: Weights = "int8") -> None:
    """Round the inputs of linear modules and experts to 8 bits in PyTorch from now on, as native operators do."""
    paired, head = weights == "int4", model.get_output_embeddings()
    experts = {name.rpartition(".")[0] for name in expert_matrices(model)}

    def rounding(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_quantize(arguments[0], paired and module is not head), *arguments[1:])

    for module in [*linear_modules(model).values(), head, *map(model.get_submodule, experts)]:
        module.register_forward_pre_hook(rounding)
    if experts:
        model.set_experts_implementation("batched_mm")  # in which what the gate gives can be replaced
    for module in map(cast(Any, model).get_submodule, experts):
        module._apply_gate = _rounding(module._apply_gate, paired)


def _rounding(apply_gate: Callable[[Tensor], Tensor], paired: bool) -> Callable[[Tensor], Tensor]:
    return lambda states: fake_quantize(apply_gate(states), paired)
