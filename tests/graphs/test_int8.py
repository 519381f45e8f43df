"""Int8: quantization errors are within a step, and a row does not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spaceport.graphs.int8 import (
    INT8_MAX,
    LIMB_BASE,
    InputScale,
    IntegerLinear,
    LinearScales,
    best_scales,
    codes_of,
    fake_quantize,
    quantize_linear,
    quantize_rows,
    row_scales,
)


def random_matrix(seed: int, rows: int, inputs: int, size: float) -> Tensor:
    return size * torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) ** 3


matrices = st.builds(
    random_matrix,
    st.integers(0, 1 << 30),
    st.integers(1, 9),
    st.sampled_from((8, 32, 96)),
    st.sampled_from((1e-6, 0.02, 100.0)),
)


@settings(max_examples=40)
@given(matrices)
def test_the_error_of_a_weight_is_at_most_half_a_step_of_its_row(weight: Tensor) -> None:
    codes, scale = quantize_rows(weight)
    assert int(codes.abs().max()) <= INT8_MAX
    assert bool(((codes.float() * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all())


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = quantize_rows(torch.zeros(2, 8))
    assert not codes.any()
    assert bool((scale > 0).all())
    for limbs in (1, 2):
        rounded, clipped = fake_quantize(torch.zeros(2, 8), InputScale(None), limbs)
        assert not rounded.any()
        assert clipped == 0


@settings(max_examples=40)
@given(matrices, st.sampled_from((1, 2)))
def test_the_error_of_an_input_within_range_is_at_most_half_a_step_of_the_last_limb(states: Tensor, limbs: int) -> None:
    bound = 1.5 * float(states.abs().max())
    step = bound / INT8_MAX / (LIMB_BASE if limbs == 2 else 1)
    rounded, clipped = fake_quantize(states, InputScale(bound), limbs)
    assert clipped == 0
    # the low limb saturates at 127
    assert float((rounded - states).abs().max()) <= (0.51 if limbs == 1 else 1.01) * step


@pytest.mark.parametrize("limbs", [1, 2])
def test_values_beyond_a_static_range_are_clipped_and_counted(limbs: int) -> None:
    rounded, clipped = fake_quantize(torch.tensor([[0.5, -40.0, 3.0]]), InputScale(1.0), limbs)
    assert clipped == 2
    assert 1.0 <= float(-rounded[0, 1]) <= 1.02
    assert 0.99 <= float(rounded[0, 2]) <= 1.01


@settings(max_examples=40)
@given(matrices, st.sampled_from((1, 2)), st.integers(0, 8))
def test_a_row_is_quantized_equally_alone_and_with_other_rows(states: Tensor, limbs: int, row: int) -> None:
    row %= len(states)
    together, _ = fake_quantize(states, InputScale(None), limbs)
    alone, _ = fake_quantize(states[row : row + 1], InputScale(None), limbs)
    assert torch.equal(together[row : row + 1], alone)


def test_dynamic_scales_keep_the_precision_of_small_rows_next_to_large_ones() -> None:
    states = torch.cat((random_matrix(0, 1, 64, 1e4), random_matrix(1, 1, 64, 1e-3)))
    rounded, _ = fake_quantize(states, InputScale(None), 2)
    assert bool(((rounded - states).abs().amax(dim=1) <= 1e-3 * states.abs().amax(dim=1)).all())


def test_smoothing_factors_cancel_out() -> None:
    weight, states = random_matrix(0, 5, 32, 0.1), random_matrix(1, 3, 32, 1.0)
    smoothing = torch.linspace(0.25, 4.0, 32)
    expected = states @ weight.T
    for scale in (InputScale(None), InputScale(None, smoothing), InputScale(200.0, smoothing)):
        layer = quantize_linear(weight, LinearScales(scale))
        got = fake_quantize(states, scale, 2)[0] @ layer.dequantized
        assert float((got - expected).norm()) <= 0.03 * float(expected.norm())


def test_two_limbs_are_256_times_as_precise_as_one() -> None:
    states = random_matrix(3, 50, 64, 1.0)
    one, two = (fake_quantize(states, InputScale(float(states.abs().max())), limbs)[0] - states for limbs in (1, 2))
    assert 150 < float(one.norm() / two.norm()) < 400


def test_the_dequantized_weight_is_codes_times_scales() -> None:
    product = IntegerLinear(
        torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), torch.tensor([0.5, 0.25]), InputScale(1.0)
    )
    assert torch.equal(product.dequantized, torch.tensor([[0.5, -0.5], [1.5, 1.0]]))


def test_weight_scales_depend_on_the_sizes_of_input_channels() -> None:
    weight = random_matrix(0, 6, 64, 0.1)
    sizes = torch.where(torch.arange(64) < 32, 1.0, 1e-3)
    weight[:, 40] = 3.0  # large weights of a small channel
    scale = best_scales(weight, sizes)
    assert bool((scale <= row_scales(weight)).all())
    error = ((codes_of(weight, scale).float() * scale[:, None] - weight) * sizes).square().sum()
    unclipped = row_scales(weight)
    assert float(error) < float(
        ((codes_of(weight, unclipped).float() * unclipped[:, None] - weight) * sizes).square().sum()
    )
