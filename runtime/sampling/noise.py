"""Noise: the Gumbel noise of each token at each position, as docs/sampling.md specifies it."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_EXPONENT = np.uint64(0x3FF0000000000000)  # the bits of 1.0: with 52 bits of a fraction, a number from 1 to 2
_LESS_ONE = 1 - 2.0**-53  # leaves that fraction and half a step: never 0, never 1
_BLOCK = 16384  # tokens at a time, so that their arrays stay in the cache


def noise_key(seed: int, path: tuple[int, ...], position: int) -> int:
    """The key of the noise at one position of one thread."""
    packed = struct.pack(f"<{len(path) + 3}Q", seed, len(path), *path, position)
    return int.from_bytes(hashlib.blake2b(packed).digest()[:8], "little")


def gumbels(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise of these tokens under a key; each is independent of the others."""
    noise = np.empty(tokens.size, np.float64)
    scratch = np.empty(min(_BLOCK, tokens.size), np.uint64)
    for first in range(0, tokens.size, _BLOCK):
        block = noise[first : first + _BLOCK]
        np.add(tokens[first : first + _BLOCK].view(np.uint64), np.uint64(1), out=block.view(np.uint64))
        _from_counters(block, np.uint64(key), scratch[: block.size])
    return noise


def _from_counters(noise: NDArray[np.float64], key: np.uint64, scratch: NDArray[np.uint64]) -> None:
    """Turn the counters in this memory into noise, in place: SplitMix64, then two logarithms."""
    bits = noise.view(np.uint64)
    bits *= _GAMMA
    bits += key
    bits ^= np.right_shift(bits, np.uint64(30), out=scratch)
    bits *= _FIRST
    bits ^= np.right_shift(bits, np.uint64(27), out=scratch)
    bits *= _SECOND
    bits ^= np.right_shift(bits, np.uint64(31), out=scratch)
    bits >>= np.uint64(12)
    bits |= _EXPONENT
    noise -= _LESS_ONE
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
