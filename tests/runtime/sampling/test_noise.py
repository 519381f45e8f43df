"""Noise: the same numbers for ever, each a function of its seed, path, position and token alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.runtime.sampling.noise import gumbels, noise_key
from support.slow_sampling import noise_slowly


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**64 - 1),
    path=st.lists(st.integers(0, 2**63), max_size=3).map(tuple),
    position=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=20),
)
def test_noise_is_what_the_slow_rule_says_whatever_else_is_asked_for(
    seed: int, path: tuple[int, ...], position: int, tokens: list[int]
) -> None:
    noise = gumbels(noise_key(seed, path, position), np.array(tokens))
    assert noise.tolist() == pytest.approx([noise_slowly(seed, path, position, token) for token in tokens], rel=1e-13)


def test_noise_never_changes() -> None:
    assert noise_key(0, (), 0) == 0x1D2BA7DAB6544E13
    assert noise_key(42, (0, 2), 17) == 0xE1E7C0664B1CB734
    noise = gumbels(0xE1E7C0664B1CB734, np.array([0, 1, 31999, 151999])).tolist()
    assert noise == pytest.approx(
        [-1.02654326453006, 1.07466523248461, 0.8479272461572842, 0.294170449021082], rel=1e-13
    )
    # the published first outputs of SplitMix64 for this seed
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    expected = [-math.log(-math.log(((output >> 12) + 0.5) / 2**52)) for output in published]
    assert gumbels(1234567, np.arange(4)).tolist() == pytest.approx(expected, rel=1e-13)


def test_noise_of_a_large_vocabulary_is_that_of_its_tokens() -> None:
    everything = gumbels(77, np.arange(40_000))
    some = np.random.default_rng(0).permutation(40_000)[:500]
    assert gumbels(77, some).tolist() == everything[some].tolist()


def test_noise_is_spread_as_gumbels_are() -> None:
    noise = np.concatenate([gumbels(noise_key(3, (), position), np.arange(1000)) for position in range(500)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert noise.min() > -3.61
    assert noise.max() < 36.8
    below = np.arange(-2, 6)
    np.testing.assert_allclose([(noise < edge).mean() for edge in below], np.exp(-np.exp(-below)), atol=0.003)
