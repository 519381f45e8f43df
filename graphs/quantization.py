"""Weights of linear layers in fewer bits, and the rounding of weights and of the inputs of products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from spaceport.graphs.contract.formats import Weights
from spaceport.graphs.streamed_weights import ReadRows, replace_values, rows_of, stored_beside

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
    factors: tuple[float, ...] = (1.0,)
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
        for factor in self.factors if len(self.factors) > 1 else ():
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


def int4_format(dtype: torch.dtype) -> WeightFormat:
    """Int4 codes with scales of this type, and the first block size that divides the number of inputs."""
    return WeightFormat((-8, 7), dtype, tuple(1 - 0.04 * step for step in range(11)), BLOCKS)


def unclipped_format(weights: Weights, dtype: torch.dtype) -> WeightFormat:
    """Int8 or float8 codes with one scale of this type per output channel, which clips nothing."""
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
