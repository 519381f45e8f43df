"""What each operator computes, in numpy: the same roundings as the kernels, sums in float64."""

import math

import numpy as np
from numpy.typing import NDArray

from spaceport.kernels.packing import QuantizedWeights

Array = NDArray[np.float32]
F = np.float32


def row_sum(values: Array) -> Array:
    """Sums of rows in float32, in the order of the kernels: 16 lanes, then halves."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 16))).reshape(len(values), -1, 16)
    lanes = np.zeros((len(values), 16), F)
    for part in range(padded.shape[1]):
        lanes = lanes + padded[:, part]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes


def normalized(x: Array, kind: str, gain: Array | None, bias: Array | None, epsilon: float) -> Array:
    if kind == "none":
        return x
    mean = row_sum(x) / F(x.shape[1]) if kind == "layer" else F(0)
    centred = x - mean
    variance = (centred.astype(np.float64) ** 2).mean(axis=1, keepdims=True).astype(F)  # the kernels' is fused
    y = centred * (F(1) / np.sqrt(variance + F(epsilon)))
    y = y if gain is None else y * gain
    return y if bias is None else y + bias


def rounded(x: Array, block: int = 32) -> tuple[NDArray[np.int64], Array]:
    """8-bit codes of rows and the scale of each block of inputs."""
    blocks = x.reshape(len(x), -1, block)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    factors = np.divide(F(127), top, out=np.zeros_like(top), where=top > 1e-30)
    codes = np.rint(blocks * factors).astype(np.int64)
    return codes.reshape(x.shape), np.where(top > 1e-30, top / F(127), F(0))[..., 0]


def product(
    x: Array, weights: Array | QuantizedWeights, bias: Array | None = None, block: int = 32
) -> NDArray[np.float64]:
    """Rows rounded in blocks, times weights (outputs x inputs); those of int4_pair take blocks of 64."""
    if isinstance(weights, QuantizedWeights):
        block = 64 if weights.format.scales == "pair" else block
        weights = weights.dequantized()
    codes, scales = rounded(x, block)
    y = (codes * scales.repeat(block, axis=1).astype(np.float64)) @ weights.astype(np.float64).T
    return y if bias is None else y + bias


def adapter(x: Array, down: Array, up: Array) -> NDArray[np.float64]:
    """What a low-rank adapter adds to the outputs of rows: the rows between its matrices are rounded again."""
    return product(product(x, down).astype(F), up)


def activated(x: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if kind == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
    return x
