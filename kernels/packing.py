"""Weights in the layouts that the kernels read: see formats.h, which describes the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # inputs that share a scale
PANEL = 32  # outputs that lie together
SUPERBLOCK = 256  # inputs that share the factors of their blocks' scales
PAIR_FACTOR = 2.0**-12  # of a float16 number that is stored for an output of int4_pair
MINIMUM_UNIT = 16  # of a byte of a minimum of int4_pair

Halves = NDArray[np.float16]

_SHARES = (1.0, 0.9)  # of the range of a block with which the search for scales begins
_MOST_HALF = 65504.0  # the largest number in float16
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class WeightFormat:
    """How packed weights are encoded: weight = scale * (code - zero) - minimum."""

    name: str
    bits: int  # of a code
    zero: int  # code of weight 0, before the minimum is subtracted
    has_minima: bool
    scales: Literal["block", "superblock", "pair"]  # float16 numbers of blocks, or bytes
    scale_block: int = BLOCK  # inputs that share a scale

    @property
    def input_multiple(self) -> int:
        """What the number of inputs must be a multiple of."""
        return {"block": BLOCK, "superblock": SUPERBLOCK, "pair": 2 * BLOCK}[self.scales]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a block of 32 outputs; as many of its minima, if there are any."""
        return PANEL * (BLOCK // self.scale_block) * (2 if self.scales == "block" else 1)

    @property
    def header_bytes(self) -> int:
        """Bytes of the factors before the blocks of a panel, or of a superblock of it."""
        return {"block": 0, "superblock": PANEL * (4 if self.has_minima else 2), "pair": 2 * PANEL}[self.scales]

    def headers(self, inputs: int) -> int:
        """How many headers a panel of so many inputs has."""
        return inputs // SUPERBLOCK if self.scales == "superblock" else 1


WEIGHT_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("int4", 4, 0, True, "block"),  # GGUF: Q4_0, Q4_1
        WeightFormat("int4_k", 4, 0, True, "superblock"),  # Q4_K
        WeightFormat("int4_pair", 4, 8, True, "pair"),  # rounded by the export
        WeightFormat("int5", 5, 16, False, "block"),  # Q5_0
        WeightFormat("int5_min", 5, 0, True, "block"),  # Q5_1
        WeightFormat("int5_k", 5, 0, True, "superblock"),  # Q5_K
        WeightFormat("int8", 8, 128, False, "block"),  # Q8_0
        WeightFormat("int8_k16", 8, 128, False, "superblock", 16),  # Q6_K
    )
}


@dataclass(frozen=True)
class QuantizedWeights:
    """Codes of a matrix with the scales and minima of their blocks, not yet packed."""

    format: WeightFormat
    codes: NDArray[np.uint8]  # outputs x inputs
    scales: NDArray[np.generic]  # outputs x blocks: float16; with factors uint8, of int8_k16 int8
    minima: NDArray[np.generic] | None = None  # outputs x blocks, of the same type; of int4_pair int8
    factors: NDArray[np.float16] | None = None  # outputs x superblocks: of scales; of int4_pair outputs x 1: of both
    minimum_factors: NDArray[np.float16] | None = None  # outputs x superblocks: of minima

    def dequantized(self) -> NDArray[np.float32]:
        """The weights that the codes stand for, rounded to float32: outputs x inputs."""
        block = self.format.scale_block
        paired = self.format.scales == "pair"
        factors = None if paired else self.factors
        scales = _scaled(self.scales, factors, SUPERBLOCK // block).repeat(block, axis=1)
        weights = (self.codes.astype(np.float64) - self.format.zero) * scales
        if self.minima is not None:
            minima = _scaled(self.minima, self.minimum_factors, SUPERBLOCK // BLOCK).repeat(BLOCK, axis=1)
            weights -= minima * (MINIMUM_UNIT if paired else 1)
        if paired:
            weights *= cast(Halves, self.factors).astype(np.float64) * PAIR_FACTOR
        return weights.astype(np.float32)


def quantize(weights: NDArray[np.float32], format_name: str) -> QuantizedWeights:
    """Round weights (outputs x inputs) to a format, each to the nearest code."""
    weight_format = WEIGHT_FORMATS[format_name]
    outputs, inputs = weights.shape
    if inputs % weight_format.input_multiple:
        expected = f"expected a multiple of {weight_format.input_multiple} for {format_name}"
        raise ValueError(f"the matrix has {inputs} inputs: {expected}")
    blocks = weights.reshape(outputs, -1, weight_format.scale_block)
    if weight_format.scales == "pair":
        return _in_pairs(blocks, weight_format)
    if format_name == "int4":
        return _in_blocks(blocks, weight_format)
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
    rows = codes.astype(np.uint8).reshape(outputs, inputs)
    return QuantizedWeights(weight_format, rows, scales, minima, factors, minimum_factors)


def _in_blocks(blocks: NDArray[np.float32], weight_format: WeightFormat) -> QuantizedWeights:
    """Codes of blocks with a scale and a minimum in float16."""
    scales, minima = (each.astype(np.float16) for each in _fitted(blocks))
    codes = _codes(blocks, scales.astype(np.float32), minima.astype(np.float32))
    return QuantizedWeights(weight_format, codes.astype(np.uint8).reshape(len(blocks), -1), scales, minima)


def _in_pairs(blocks: NDArray[np.float32], weight_format: WeightFormat) -> QuantizedWeights:
    """Codes of blocks whose scales and minima are bytes relative to a factor of their output."""
    steps, offsets = _fitted(blocks)
    factors = (steps.max(axis=1, keepdims=True) / 255 / PAIR_FACTOR).clip(0, _MOST_HALF).astype(np.float16)
    unit = factors.astype(np.float32) * np.float32(PAIR_FACTOR)
    scales, minima, shifts = _nearest_bytes(blocks, steps, offsets, unit, weight_format.zero)
    codes = _codes(blocks, scales * unit, shifts).astype(np.uint8).reshape(len(blocks), -1)
    return QuantizedWeights(weight_format, codes, scales.astype(np.uint8), minima.astype(np.int8), factors)


def _nearest_bytes(
    blocks: NDArray[np.float32],
    steps: NDArray[np.float32],
    offsets: NDArray[np.float32],
    unit: NDArray[np.float32],
    zero: int,
) -> tuple[NDArray[np.float32], ...]:
    """Scales and minima as whole numbers of units, each the one below or above, with the smallest squared error.

    A code `zero` stands for a weight of 0 before the minimum is subtracted. The third result is what then is added to
    weights, so that the codes begin at 0.
    """
    below, least = np.floor(_units(steps, unit)), np.full_like(steps, np.inf)
    kept: tuple[NDArray[np.float32], ...] = (below, below, below)
    for above, minimum_above in product((0, 1), (0, 1)):
        scales = (below + above).clip(0, 255)
        rest = (offsets - zero * scales * unit).astype(np.float32)
        minima = np.floor(_units(rest, unit * MINIMUM_UNIT)) + minimum_above
        minima = minima.clip(-128, 127)
        shifts = (zero * scales + MINIMUM_UNIT * minima) * unit
        error = _error(blocks, scales * unit, shifts)
        better = error < least
        kept = tuple(np.where(better, *each) for each in zip((scales, minima, shifts), kept, strict=True))
        least = np.minimum(error, least)
    return kept


def _fitted(blocks: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minima of 4-bit codes, of each block those with the smallest squared error that are found.

    They begin with the range of a block, or less of it; the scale and minimum that fit the codes best follow, twice.
    """
    lowest, highest = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    kept = (highest - lowest) / 15, -lowest
    least = _error(blocks, *kept)
    for share in _SHARES:
        scale, minimum = share * (highest - lowest) / 15, -share * lowest
        for _ in range(2):
            tried = _codes(blocks, scale, minimum)
            mean, mean_code = blocks.mean(axis=2), tried.mean(axis=2)
            spread = np.square(tried - mean_code[..., None]).sum(axis=2)
            slope = ((tried - mean_code[..., None]) * blocks).sum(axis=2) / np.where(spread > 0, spread, 1)
            scale, minimum = np.maximum(slope, 0), np.maximum(slope * mean_code - mean, 0)
        error = _error(blocks, scale, minimum)
        kept = np.where(error < least, scale, kept[0]), np.where(error < least, minimum, kept[1])
        least = np.minimum(error, least)
    return kept


def _codes(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], minima: NDArray[np.float32]
) -> NDArray[np.float32]:
    return np.rint(_divided(blocks + minima[..., None], scales)).clip(0, 15)


def _error(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], minima: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The squared error of each block."""
    found = _codes(blocks, scales, minima) * scales[..., None] - minima[..., None]
    return cast(NDArray[np.float32], np.square(found - blocks).sum(axis=2))


def _units(values: NDArray[np.float32], unit: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of blocks relative to a unit of their row."""
    return np.divide(values, unit, out=np.zeros_like(values), where=unit > 0)


def _stored(
    steps: NDArray[np.float32], weight_format: WeightFormat
) -> tuple[NDArray[np.generic], NDArray[np.float16] | None]:
    """Scales or minima as a format stores them, and the factors of superblocks; scales are rounded up."""
    if weight_format.scales == "block":
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
    numbers = [weights.scales] if weights.minima is None else [weights.scales, weights.minima]
    if weight_format.scales == "pair":
        parts = [parts[0].reshape(panels, blocks // 2, -1)]
        parts += [_panels(each, padding, blocks // 2, paired=True) for each in numbers]
    else:
        parts += [_panels(each, padding, blocks) for each in numbers]
    packed = np.concatenate(parts, axis=2)
    if weights.factors is None:
        return packed.reshape(-1)
    headers = weight_format.headers(inputs)
    parts = [_panels(weights.factors, padding, headers)]
    if weights.minimum_factors is not None:
        parts.append(_panels(weights.minimum_factors, padding, headers))
    return np.concatenate([*parts, packed.reshape(panels, headers, -1)], axis=2).reshape(-1)


def packed_bytes(weight_format: WeightFormat, outputs: int, inputs: int) -> int:
    """The length of a packed matrix."""
    codes = PANEL * BLOCK * weight_format.bits // 8
    block = codes + weight_format.scale_bytes * (2 if weight_format.has_minima else 1)
    headers = weight_format.headers(inputs) * weight_format.header_bytes
    return -(-outputs // PANEL) * (inputs // BLOCK * block + headers)


def gate_order(width: int) -> NDArray[np.int64]:
    """Which rows of the gate and up matrices, one below the other, GateProduct expects in which order.

    Each panel holds 16 outputs of the gate and the same 16 of up.
    """
    if width % (PANEL // 2):
        raise ValueError(f"the MLP has a width of {width}: expected a multiple of {PANEL // 2}")
    gate = np.arange(width).reshape(-1, PANEL // 2)
    return np.concatenate([gate, gate + width], axis=1).reshape(-1)


def _panels(values: NDArray[np.generic], padding: int, blocks: int, paired: bool = False) -> NDArray[np.uint8]:
    """Values of outputs and blocks (outputs x values) as bytes: panels x blocks x bytes.

    Outputs are innermost, or pairs of values, the second before the first.
    """
    padded = _padded(values, padding, 0)
    panels = padded.shape[0] // PANEL
    split = padded.reshape(panels, PANEL, blocks, -1)
    ordered = np.ascontiguousarray(split[..., ::-1].transpose(0, 2, 1, 3) if paired else split.transpose(0, 2, 3, 1))
    return ordered.view(np.uint8).reshape(panels, blocks, -1)


def _padded(values: NDArray[Number], padding: int, fill: int) -> NDArray[Number]:
    return np.pad(values, ((0, padding), (0, 0)), constant_values=fill) if padding else values


def _scaled(values: NDArray[np.generic], factors: NDArray[np.float16] | None, each: int) -> NDArray[np.float64]:
    scaled = values.astype(np.float64)
    return scaled if factors is None else scaled * factors.astype(np.float64).repeat(each, axis=1)


def _divided(blocks: NDArray[np.float32], scales: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    steps = scales[..., None].astype(np.float32)
    return np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
