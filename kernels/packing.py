"""Weights in the layouts that the kernels read: see formats.h, which describes the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # inputs that share a scale
PANEL = 32  # outputs that lie together
SUPERBLOCK = 256  # inputs that share the factors of their blocks' scales

Halves = NDArray[np.float16]

_SHARES = (1.0, 0.9)  # of the range of a block with which the search for int4 codes begins
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class WeightFormat:
    """How packed weights are encoded: weight = scale * (code - zero) - minimum."""

    name: str
    bits: int  # of a code
    zero: int  # code of weight 0, before the minimum is subtracted
    has_minima: bool
    has_superblocks: bool  # scales and minima are bytes, relative to float16 factors
    scale_block: int = BLOCK  # inputs that share a scale

    @property
    def input_multiple(self) -> int:
        """What the number of inputs must be a multiple of."""
        return SUPERBLOCK if self.has_superblocks else BLOCK


WEIGHT_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("int4", 4, 0, True, False),  # GGUF: Q4_0, Q4_1
        WeightFormat("int4_k", 4, 0, True, True),  # Q4_K
        WeightFormat("int5", 5, 16, False, False),  # Q5_0
        WeightFormat("int5_min", 5, 0, True, False),  # Q5_1
        WeightFormat("int5_k", 5, 0, True, True),  # Q5_K
        WeightFormat("int8", 8, 128, False, False),  # Q8_0
        WeightFormat("int8_k16", 8, 128, False, True, 16),  # Q6_K
    )
}


@dataclass(frozen=True)
class QuantizedWeights:
    """Codes of a matrix with the scales and minima of their blocks, not yet packed."""

    format: WeightFormat
    codes: NDArray[np.uint8]  # outputs x inputs
    scales: NDArray[np.generic]  # outputs x blocks: float16; with superblocks uint8, of int8_k16 int8
    minima: NDArray[np.generic] | None = None  # outputs x blocks, of the same type
    factors: NDArray[np.float16] | None = None  # outputs x superblocks: of scales
    minimum_factors: NDArray[np.float16] | None = None  # outputs x superblocks: of minima

    def dequantized(self) -> NDArray[np.float32]:
        """The weights that the codes stand for, rounded to float32: outputs x inputs."""
        block = self.format.scale_block
        scales = _scaled(self.scales, self.factors, SUPERBLOCK // block).repeat(block, axis=1)
        weights = (self.codes.astype(np.float64) - self.format.zero) * scales
        if self.minima is not None:
            weights -= _scaled(self.minima, self.minimum_factors, SUPERBLOCK // BLOCK).repeat(BLOCK, axis=1)
        return weights.astype(np.float32)


def quantize(weights: NDArray[np.float32], format_name: str) -> QuantizedWeights:
    """Round weights (outputs x inputs) to a format, each to the nearest code."""
    weight_format = WEIGHT_FORMATS[format_name]
    outputs, inputs = weights.shape
    if inputs % weight_format.input_multiple:
        expected = f"expected a multiple of {weight_format.input_multiple} for {format_name}"
        raise ValueError(f"the matrix has {inputs} inputs: {expected}")
    blocks = weights.reshape(outputs, -1, weight_format.scale_block)
    most = (1 << weight_format.bits if weight_format.has_minima else weight_format.zero) - 1
    if weight_format.has_minima:
        minima, minimum_factors = _stored(-np.minimum(blocks.min(axis=2), 0), weight_format)
        offsets = _scaled(minima, minimum_factors, SUPERBLOCK // BLOCK).astype(np.float32)
        steps = (np.maximum(blocks.max(axis=2), 0) + offsets) / most
    else:
        steps, minima, minimum_factors = np.abs(blocks).max(axis=2) / most, None, None
        offsets = np.zeros(1, np.float32)
    scales, factors = _stored(steps, weight_format)
    wide = _scaled(scales, factors, SUPERBLOCK // weight_format.scale_block).astype(np.float32)
    codes = np.rint(_divided(blocks + offsets[..., None], wide))
    codes = np.clip(codes, 0, most) if weight_format.has_minima else np.clip(codes, -most, most) + weight_format.zero
    if format_name == "int4":
        codes, scales, minima = _refined(blocks, codes, scales, cast(Halves, minima))
    rows = codes.astype(np.uint8).reshape(outputs, inputs)
    return QuantizedWeights(weight_format, rows, scales, minima, factors, minimum_factors)


def _refined(
    blocks: NDArray[np.float32], codes: NDArray[np.float32], scales: NDArray[np.generic], minima: Halves
) -> tuple[NDArray[np.float32], Halves, Halves]:
    """Int4 codes, scales and minima, of each block those with the smallest squared error that are found.

    They begin with the range of a block, or less of it; the scale and minimum that fit the codes best follow, twice.
    """
    kept = codes, cast(Halves, scales), minima
    least = _error(blocks, *kept)
    lowest, highest = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    for share in _SHARES:
        scale = (share * (highest - lowest) / 15).astype(np.float16)
        minimum = (-share * lowest).astype(np.float16)
        for _ in range(2):
            tried = _codes(blocks, scale, minimum)
            mean, mean_code = blocks.mean(axis=2), tried.mean(axis=2)
            spread = np.square(tried - mean_code[..., None]).sum(axis=2)
            slope = ((tried - mean_code[..., None]) * blocks).sum(axis=2) / np.where(spread > 0, spread, 1)
            scale = np.maximum(slope, 0).astype(np.float16)
            minimum = np.maximum(slope * mean_code - mean, 0).astype(np.float16)
        found = _codes(blocks, scale, minimum), scale, minimum
        error = _error(blocks, *found)
        better = error < least
        codes, scales, minima = kept
        kept = (
            np.where(better[..., None], found[0], codes),
            np.where(better, found[1], scales),
            np.where(better, found[2], minima),
        )
        least = np.minimum(error, least)
    return kept


def _codes(blocks: NDArray[np.float32], scales: Halves, minima: Halves) -> NDArray[np.float32]:
    return np.clip(np.rint(_divided(blocks + minima[..., None].astype(np.float32), scales)), 0, 15)


def _error(
    blocks: NDArray[np.float32], codes: NDArray[np.float32], scales: Halves, minima: Halves
) -> NDArray[np.float32]:
    """The squared error of each block."""
    steps, offsets = (values[..., None].astype(np.float32) for values in (scales, minima))
    return cast(NDArray[np.float32], np.square(codes * steps - offsets - blocks).sum(axis=2))


def _stored(
    steps: NDArray[np.float32], weight_format: WeightFormat
) -> tuple[NDArray[np.generic], NDArray[np.float16] | None]:
    """Scales or minima as a format stores them, and the factors of superblocks; scales are rounded up."""
    if not weight_format.has_superblocks:
        return steps.astype(np.float16), None
    kind = np.uint8 if weight_format.has_minima else np.int8
    groups = steps.reshape(len(steps), -1, SUPERBLOCK // weight_format.scale_block)
    factors = (groups.max(axis=2) / np.iinfo(kind).max).astype(np.float16)
    units = np.ceil(_divided(groups, factors)).clip(0, np.iinfo(kind).max)
    return units.astype(kind).reshape(steps.shape), factors


def pack(weights: QuantizedWeights) -> NDArray[np.uint8]:
    """The packed bytes of a matrix; outputs are padded to whole panels with weights of 0."""
    weight_format = weights.format
    outputs, inputs = weights.codes.shape
    if inputs % weight_format.input_multiple:
        expected = f"expected a multiple of {weight_format.input_multiple} for {weight_format.name}"
        raise ValueError(f"the matrix has {inputs} inputs: {expected}")
    padding = -outputs % PANEL
    panels, blocks = (outputs + padding) // PANEL, inputs // BLOCK
    codes = _padded(weights.codes, padding, weight_format.zero)
    if weight_format.bits == 8:
        body = codes.reshape(panels, PANEL, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    else:
        pairs = (codes & 15).reshape(panels, 2, 16, blocks, 4, 2, 4).transpose(0, 3, 1, 4, 2, 6, 5)
        body = pairs[..., 0] | pairs[..., 1] << 4
    parts = [body.reshape(panels, blocks, -1)]
    if weight_format.bits == 5:
        fifths = (codes >> 4).reshape(panels, 2, 16, blocks, 8, 4).transpose(0, 3, 1, 4, 2, 5)
        parts.append(np.packbits(fifths.reshape(panels, blocks, -1), axis=2, bitorder="little"))
    parts.append(_panels(weights.scales, padding, blocks))
    if weights.minima is not None:
        parts.append(_panels(weights.minima, padding, blocks))
    packed = np.concatenate(parts, axis=2)
    if weights.factors is None:
        return packed.reshape(-1)
    supers = inputs // SUPERBLOCK
    headers = [_panels(weights.factors, padding, supers)]
    if weights.minimum_factors is not None:
        headers.append(_panels(weights.minimum_factors, padding, supers))
    return np.concatenate([*headers, packed.reshape(panels, supers, -1)], axis=2).reshape(-1)


def packed_bytes(weight_format: WeightFormat, outputs: int, inputs: int) -> int:
    """The length of a packed matrix."""
    parts = BLOCK // weight_format.scale_block * (1 if weight_format.has_superblocks else 2)
    block = PANEL * (BLOCK * weight_format.bits // 8 + parts * (2 if weight_format.has_minima else 1))
    header = PANEL * (4 if weight_format.has_minima else 2) * weight_format.has_superblocks
    panels = -(-outputs // PANEL)
    return panels * (inputs // BLOCK * block + inputs // SUPERBLOCK * header)


def gate_order(width: int) -> NDArray[np.int64]:
    """Which rows of the gate and up matrices, one below the other, GateProduct expects in which order.

    Each panel holds 16 outputs of the gate and the same 16 of up.
    """
    if width % (PANEL // 2):
        raise ValueError(f"the MLP has a width of {width}: expected a multiple of {PANEL // 2}")
    gate = np.arange(width).reshape(-1, PANEL // 2)
    return np.concatenate([gate, gate + width], axis=1).reshape(-1)


def _panels(values: NDArray[np.generic], padding: int, blocks: int) -> NDArray[np.uint8]:
    """Values of outputs and blocks (outputs x values) as bytes: panels x blocks x bytes, outputs innermost."""
    padded = _padded(values, padding, 0)
    panels = padded.shape[0] // PANEL
    ordered = np.ascontiguousarray(padded.reshape(panels, PANEL, blocks, -1).transpose(0, 2, 3, 1))
    return ordered.view(np.uint8).reshape(panels, blocks, -1)


def _padded(values: NDArray[Number], padding: int, fill: int) -> NDArray[Number]:
    return np.pad(values, ((0, padding), (0, 0)), constant_values=fill) if padding else values


def _scaled(values: NDArray[np.generic], factors: NDArray[np.float16] | None, each: int) -> NDArray[np.float64]:
    scaled = values.astype(np.float64)
    return scaled if factors is None else scaled * factors.astype(np.float64).repeat(each, axis=1)


def _divided(blocks: NDArray[np.float32], scales: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    steps = scales[..., None].astype(np.float32)
    return np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
