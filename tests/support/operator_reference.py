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


def turned(heads: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Heads (rows x heads x size) rotated by the angles of their rows (rows x pairs)."""
    half = cos.shape[1]
    turned = heads.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    c, s = cos[:, None], sin[:, None]
    a, b = heads[..., first].astype(np.float64), heads[..., second].astype(np.float64)
    turned[..., first] = a * c - (heads[..., second] * s).astype(np.float64)
    turned[..., second] = b * c + (heads[..., first] * s).astype(np.float64)
    return turned


def attend(
    qkv: Array,
    cos: Array,
    sin: Array,
    slots: NDArray[np.int64],
    visible: NDArray[np.bool_],  # rows x seen
    keys: NDArray[np.int8],  # KV heads x slots x size; changed in place, as values and scales
    values: NDArray[np.int8],
    scales: Array,  # 2 * KV heads x slots
    heads: int,
    scale: float,
    cap: float = 0.0,
    interleaved: bool = False,
    q_gain: Array | None = None,
    k_gain: Array | None = None,
    sinks: Array | None = None,
    epsilon: float = 0.0,
) -> NDArray[np.float64]:
    kv_heads, _, size = keys.shape
    rows, share, seen = len(qkv), heads // kv_heads, visible.shape[1]
    states = qkv.reshape(rows, heads + 2 * kv_heads, size)
    q, k, v = np.split(states, [heads, heads + kv_heads], axis=1)

    def normed(x: Array, gain: Array | None) -> Array:
        flat = normalized(x.reshape(-1, size), "none" if gain is None else "rms", gain, None, epsilon)
        return flat.reshape(x.shape)

    q, k = turned(normed(q, q_gain), cos, sin, interleaved), turned(normed(k, k_gain), cos, sin, interleaved)
    for stored, states, first in ((keys, k, 0), (values, v, kv_heads)):
        for head in range(kv_heads):
            for row, slot in enumerate(slots):
                codes, size_of = rounded(np.ascontiguousarray(states[row : row + 1, head]), size)
                stored[head, slot], scales[first + head, slot] = codes[0], size_of[0, 0]
    y = np.zeros((rows, heads, size))
    for head in range(heads):
        kv = head // share
        codes, q_scales = rounded(np.ascontiguousarray(q[:, head]), size)
        scores = (codes @ keys[kv, :seen].astype(np.int64).T).astype(F) * scales[kv, :seen] * (q_scales * F(scale))
        if cap:
            scores = F(cap) * np.tanh(scores / F(cap))
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[head])
        weights = np.exp((scores - top).astype(np.float64))
        total = np.rint(weights * 65536).sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.rint(np.exp(sinks[head] - top.astype(np.float64)) * 65536)
        scaled = weights * scales[kv_heads + kv, :seen]
        most = scaled.max(axis=1, keepdims=True)
        sums = np.rint(scaled * (32767 / most)) @ values[kv, :seen].astype(np.float64)
        y[:, head] = sums * most / 32767 / (total / 65536)
    return y.reshape(rows, heads * size)
