"""Int8: integer products are as near to the floats as their steps, and a row does not depend on its neighbours."""

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


def drawn(seed: int, rows: int, inputs: int, size: float) -> Tensor:
    return size * torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) ** 3


matrices = st.builds(
    drawn,
    st.integers(0, 1 << 30),
    st.integers(1, 9),
    st.sampled_from((8, 32, 96)),
    st.sampled_from((1e-6, 0.02, 100.0)),
)


@settings(max_examples=40)
@given(matrices)
def test_a_weight_is_off_by_half_a_step_of_its_row(weight: Tensor) -> None:
    codes, scale = quantize_rows(weight)
    assert int(codes.abs().max()) <= INT8_MAX
    assert bool(((codes.float() * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all())


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = quantize_rows(torch.zeros(2, 8))
    assert not codes.any()
    assert bool((scale > 0).all())
    for limbs in (1, 2):
        rounded, cut = fake_quantize(torch.zeros(2, 8), InputScale(None), limbs)
        assert not rounded.any()
        assert cut == 0


@settings(max_examples=40)
@given(matrices, st.sampled_from((1, 2)))
def test_an_input_within_its_range_is_off_by_half_a_step_of_the_last_limb(states: Tensor, limbs: int) -> None:
    bound = 1.5 * float(states.abs().max())
    step = bound / INT8_MAX / (LIMB_BASE if limbs == 2 else 1)
    rounded, cut = fake_quantize(states, InputScale(bound), limbs)
    assert cut == 0
    # where the low limb would need its 129th step up, it stays at the 128th
    assert float((rounded - states).abs().max()) <= (0.51 if limbs == 1 else 1.01) * step


@pytest.mark.parametrize("limbs", [1, 2])
def test_values_beyond_a_fixed_range_are_cut_off_and_counted(limbs: int) -> None:
    rounded, cut = fake_quantize(torch.tensor([[0.5, -40.0, 3.0]]), InputScale(1.0), limbs)
    assert cut == 2
    assert 1.0 <= float(-rounded[0, 1]) <= 1.02
    assert 0.99 <= float(rounded[0, 2]) <= 1.01


@settings(max_examples=40)
@given(matrices, st.sampled_from((1, 2)), st.integers(0, 8))
def test_a_row_is_rounded_alike_alone_and_among_others(states: Tensor, limbs: int, row: int) -> None:
    row %= len(states)
    among, _ = fake_quantize(states, InputScale(None), limbs)
    alone, _ = fake_quantize(states[row : row + 1], InputScale(None), limbs)
    assert torch.equal(among[row : row + 1], alone)


def test_rows_with_scales_of_their_own_lose_nothing_to_a_large_neighbour() -> None:
    states = torch.cat((drawn(0, 1, 64, 1e4), drawn(1, 1, 64, 1e-3)))
    rounded, _ = fake_quantize(states, InputScale(None), 2)
    assert bool(((rounded - states).abs().amax(dim=1) <= 1e-3 * states.abs().amax(dim=1)).all())


def test_moved_scales_cancel_out() -> None:
    weight, states = drawn(0, 5, 32, 0.1), drawn(1, 3, 32, 1.0)
    move = torch.linspace(0.25, 4.0, 32)
    expected = states @ weight.T
    for scale in (InputScale(None), InputScale(None, move), InputScale(200.0, move)):
        product = quantize_linear(weight, LinearScales(scale))
        got = fake_quantize(states, scale, 2)[0] @ product.dequantized
        assert float((got - expected).norm()) <= 0.03 * float(expected.norm())


def test_two_limbs_are_256_times_as_fine_as_one() -> None:
    states = drawn(3, 50, 64, 1.0)
    one, two = (fake_quantize(states, InputScale(float(states.abs().max())), limbs)[0] - states for limbs in (1, 2))
    assert 150 < float(one.norm() / two.norm()) < 400


def test_the_sums_of_a_product_are_those_of_its_codes() -> None:
    product = IntegerLinear(
        torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), torch.tensor([0.5, 0.25]), InputScale(1.0)
    )
    assert torch.equal(product.dequantized, torch.tensor([[0.5, -0.5], [1.5, 1.0]]))


def test_scales_of_outputs_follow_the_sizes_of_channels() -> None:
    weight = drawn(0, 6, 64, 0.1)
    sizes = torch.where(torch.arange(64) < 32, 1.0, 1e-3)
    weight[:, 40] = 3.0  # large where it matters little
    scale = best_scales(weight, sizes)
    assert bool((scale <= row_scales(weight)).all())
    error = ((codes_of(weight, scale).float() * scale[:, None] - weight) * sizes).square().sum()
    whole = row_scales(weight)
    assert float(error) < float(((codes_of(weight, whole).float() * whole[:, None] - weight) * sizes).square().sum())
