"""Attentions of all kinds that the operator has, with random inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import operator_reference as reference

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
        keys, values, scales = (feeds[name][0].copy() for name in ("keys", "values", "scales"))
        y = reference.attend(
            *(
                feeds["qkv"],
                feeds["cos"],
                feeds["sin"],
                feeds["slots"][0],
                feeds["visible"][0, 0],
                keys,
                values,
                scales,
            ),
            *(self.heads, self.size**-0.5, self.cap, self.interleaved),
            *(feeds.get(name) for name in ("q_gain", "k_gain", "sinks")),
            epsilon=EPSILON,
        )
        return [y, keys[None], values[None], scales[None]]


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
