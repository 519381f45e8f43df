"""Attentions of all kinds that the operator has, with random inputs, and what it computes of them, in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.operator_reference import Array, F, normalized, rounded

EPSILON = 0.3  # of the norms: so large that it shows


@dataclass(frozen=True)
class Case:
    """Sizes of an attention and what it has."""

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
