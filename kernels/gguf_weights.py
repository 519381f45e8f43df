"""Quantized tensors of GGUF files in the packed format that holds the same weights exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spaceport.kernels.packing import BLOCK, SUPERBLOCK, WEIGHT_FORMATS, QuantizedWeights, WeightFormat

Bytes = NDArray[np.uint8]

# GGUF's types of tensors: bytes of a block, inputs that it holds, and the packed format.
GGUF_BLOCKS = {
    "Q4_0": (18, BLOCK, WEIGHT_FORMATS["int4"]),
    "Q4_1": (20, BLOCK, WEIGHT_FORMATS["int4"]),
    "Q5_0": (22, BLOCK, WEIGHT_FORMATS["int5"]),
    "Q5_1": (24, BLOCK, WEIGHT_FORMATS["int5_min"]),
    "Q8_0": (34, BLOCK, WEIGHT_FORMATS["int8"]),
    "Q4_K": (144, SUPERBLOCK, WEIGHT_FORMATS["int4_k"]),
    "Q5_K": (176, SUPERBLOCK, WEIGHT_FORMATS["int5_k"]),
    "Q6_K": (210, SUPERBLOCK, WEIGHT_FORMATS["int8_k16"]),
}


def from_gguf(data: Bytes, gguf_type: str, outputs: int, inputs: int) -> QuantizedWeights | None:
    """The weights of a GGUF tensor, or None where no packed format holds them exactly."""
    if gguf_type not in GGUF_BLOCKS:
        return None
    size, width, weight_format = GGUF_BLOCKS[gguf_type]
    if inputs % width or data.size != outputs * inputs // width * size:
        expected = f"expected {outputs * inputs // width * size} for {outputs} x {inputs} weights"
        raise ValueError(f"a tensor of type {gguf_type} has {data.size} bytes: {expected}")
    blocks = np.ascontiguousarray(data).reshape(outputs, inputs // width, size)
    if width == BLOCK:
        return _of_block(blocks, gguf_type, weight_format)
    return _q6_k(blocks) if gguf_type == "Q6_K" else _of_superblock(blocks, weight_format)


def _of_block(blocks: Bytes, gguf_type: str, weight_format: WeightFormat) -> QuantizedWeights | None:
    outputs = len(blocks)
    scales = _half(blocks, 0)
    if gguf_type == "Q8_0":
        signed = blocks[..., 2:].view(np.int8).astype(np.int16)
        return QuantizedWeights(weight_format, (signed + 128).astype(np.uint8).reshape(outputs, -1), scales)
    nibbles = blocks[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    minima = -_half(blocks, 2) if gguf_type.endswith("_1") else None
    if gguf_type.startswith("Q5"):
        high = blocks[..., -20:-16]
        codes = codes | np.unpackbits(high, axis=2, bitorder="little") << 4
    elif minima is None:  # codes are relative to 8
        with np.errstate(over="ignore"):
            minima = scales * np.float16(8)
        if not (minima.astype(np.float32) == scales.astype(np.float32) * 8).all():
            return None
    return QuantizedWeights(weight_format, codes.reshape(outputs, -1), scales, minima)


def _of_superblock(blocks: Bytes, weight_format: WeightFormat) -> QuantizedWeights:
    outputs, count, _ = blocks.shape
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=2)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=2)
    nibbles = blocks[..., -128:].reshape(outputs, count, 4, BLOCK)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=3).reshape(outputs, count, 8, BLOCK)
    if weight_format.bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | (blocks[..., 16:48][:, :, None] >> shifts & 1) << 4
    rows = (outputs, -1)
    return QuantizedWeights(
        weight_format,
        codes.reshape(rows),
        scales.reshape(rows),
        minima.reshape(rows),
        _half(blocks, 0),
        _half(blocks, 2),
    )


def _q6_k(blocks: Bytes) -> QuantizedWeights:
    outputs, count, _ = blocks.shape
    low = blocks[..., :128].reshape(outputs, count, 2, 2, BLOCK)  # halves x 2 x 32
    high = blocks[..., 128:192].reshape(outputs, count, 2, 1, BLOCK)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = np.concatenate([low & 15, low >> 4], axis=3) | (high >> shifts & 3) << 4
    rows = (outputs, -1)
    scales = blocks[..., 192:208].view(np.int8)
    factors = np.ascontiguousarray(blocks[..., 208:210]).view(np.float16)[..., 0]
    return QuantizedWeights(
        WEIGHT_FORMATS["int8_k16"], (codes + 96).reshape(rows), scales.reshape(rows), factors=factors
    )


def _half(blocks: Bytes, offset: int) -> NDArray[np.float16]:
    """The float16 number at an offset of each block: outputs x blocks."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)[..., 0]
