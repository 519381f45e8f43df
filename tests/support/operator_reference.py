"""What each operator computes, in numpy: the same roundings as the kernels, sums in float64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.kernels.packing import QuantizedWeights

Array = NDArray[np.float32]
F = np.float32
EPSILON = 0.3  # of the norms of attention: so large that it shows


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


@dataclass(frozen=True)
class Case:
    """An attention of some kind, with random inputs: its sizes and what it has."""

    rows: int = 5
    heads: int = 6
    kv_heads: int = 2
    size: int = 64
    slots: int = 100
    seen: int = 77
    rotated: int | None = None  # all channels
    interleaved: bool = False
    cap: float = 0.0
    norms: bool = False
    sinks: bool = False

    def feeds(self, dice: np.random.Generator) -> dict[str, NDArray[Any]]:
        cache = (1, self.kv_heads, self.slots, self.size)
        angles = dice.random((self.rows, (self.rotated or self.size) // 2), dtype=np.float32) * 6
        feeds = {
            "qkv": dice.standard_normal((self.rows, (self.heads + 2 * self.kv_heads) * self.size), dtype=np.float32),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
            "slots": dice.permutation(self.seen)[None, : self.rows],
            "visible": dice.random((1, 1, self.rows, self.seen)) < 0.5,
            "keys": dice.integers(-127, 128, cache).astype(np.int8),
            "values": dice.integers(-127, 128, cache).astype(np.int8),
            "scales": dice.random((1, 2 * self.kv_heads, self.slots), dtype=np.float32) * np.float32(0.02)
            + np.float32(0.001),
        }
        feeds["visible"][0, 0, np.arange(self.rows), feeds["slots"][0]] = True
        if self.norms:
            feeds["q_gain"] = dice.standard_normal(self.size, dtype=np.float32)
            feeds["k_gain"] = dice.standard_normal(self.size, dtype=np.float32)
        if self.sinks:
            feeds["sinks"] = dice.standard_normal(self.heads, dtype=np.float32) * 3
        return feeds

    @property
    def attributes(self) -> dict[str, Any]:
        given = {"heads": self.heads, "interleaved": int(self.interleaved)}
        return given | {"scale": self.size**-0.5, "cap": self.cap, "epsilon": EPSILON}

    def expected(self, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The same roundings as in the kernels, sums in float64."""
        keys, values, scales = (feeds[name][0].copy() for name in ("keys", "values", "scales"))
        visible, share = feeds["visible"][0, 0], self.heads // self.kv_heads
        states = feeds["qkv"].reshape(self.rows, -1, self.size)
        q, k, v = np.split(states, [self.heads, self.heads + self.kv_heads], axis=1)
        q, k = (self._turned(x, feeds, gain) for x, gain in ((q, "q_gain"), (k, "k_gain")))
        for stored, states, first in ((keys, k, 0), (values, v, self.kv_heads)):
            for head in range(self.kv_heads):
                for row, slot in enumerate(feeds["slots"][0]):
                    codes, size_of = rounded(np.ascontiguousarray(states[row : row + 1, head]), self.size)
                    stored[head, slot], scales[first + head, slot] = codes[0], size_of[0, 0]
        y = np.zeros((self.rows, self.heads, self.size))
        for head in range(self.heads):
            seen_keys, seen_values = (cache[head // share, : self.seen].astype(np.int64) for cache in (keys, values))
            key_scales, value_scales = scales[[head // share, self.kv_heads + head // share], : self.seen]
            codes, q_scales = rounded(np.ascontiguousarray(q[:, head]), self.size)
            scores = (codes @ seen_keys.T).astype(F) * key_scales * (q_scales * F(self.attributes["scale"]))
            if self.cap:
                scores = F(self.cap) * np.tanh(scores / F(self.cap))
            scores = np.where(visible, scores, -np.inf)
            sink = feeds["sinks"][head] if self.sinks else -np.inf
            top = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp((scores - top).astype(np.float64))
            total = np.rint(weights * 65536).sum(axis=1, keepdims=True)
            total += np.rint(np.exp(sink - top.astype(np.float64)) * 65536)
            scaled = weights * value_scales
            most = scaled.max(axis=1, keepdims=True)
            y[:, head] = np.rint(scaled * (32767 / most)) @ seen_values * most / 32767 / (total / 65536)
        return [y.reshape(self.rows, -1), keys[None], values[None], scales[None]]

    def _turned(self, heads: Array, feeds: dict[str, NDArray[Any]], gain: str) -> Array:
        """Heads (rows x heads x size), normed if there is a gain, and rotated by the angles of their rows."""
        heads = normalized(
            heads.reshape(-1, self.size), "rms" if self.norms else "none", feeds.get(gain), None, EPSILON
        ).reshape(heads.shape)
        cos, sin = feeds["cos"][:, None], feeds["sin"][:, None]  # rows x 1 x pairs
        pairs = cos.shape[2]
        first, second = (
            (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
            if self.interleaved
            else (slice(pairs), slice(pairs, 2 * pairs))
        )
        turned = heads.copy()
        turned[..., first] = heads[..., first].astype(np.float64) * cos - heads[..., second] * sin
        turned[..., second] = heads[..., second].astype(np.float64) * cos + heads[..., first] * sin
        return turned


CASES = {
    "grouped queries": Case(),
    "one row": Case(rows=1),
    "many rows": Case(rows=40, seen=97),
    "heads of their own": Case(heads=3, kv_heads=3, rows=3),
    "one KV head": Case(heads=14, kv_heads=1, rows=11),
    "one slot": Case(rows=1, slots=1, seen=1),
    "many slots": Case(rows=3, slots=1200, seen=1111),
    "heads of 8": Case(size=8),
    "heads of 40": Case(size=40),
    "heads of 80": Case(size=80),
    "heads of 96": Case(size=96),
    "heads of 128": Case(size=128),
    "heads of 256": Case(size=256),
    "part of the channels rotated": Case(size=80, rotated=32),
    "adjacent channels rotated": Case(rotated=32, interleaved=True),
    "soft cap": Case(cap=2.0),
    "norms of queries and keys": Case(norms=True, size=80),
    "sinks": Case(sinks=True),
}
