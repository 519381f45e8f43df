"""Int8: errors are within a step, rows do not depend on each other, and a model computes with the quantized numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import ACTIVATIONS, Activations
from spaceport.graphs.gated import GatedLinear, gate_model
from spaceport.graphs.int8 import (
    INT8_MAX,
    LIMB_BASE,
    InputScale,
    IntegerModel,
    LinearScales,
    best_scales,
    codes_of,
    fake_quantize,
    quantize_linear,
    quantize_rows,
    row_scales,
)
from spaceport.graphs.quantize import ModelScales, QuantizedInputs, quantize_model
from spaceport.graphs.traits import UnsupportedModel
from support.families import FAMILIES, build
from support.paths import TINY


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


def tiny_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(3, 27)[None]).logits
    return found


def quantized(
    model: PreTrainedModel, activations: Activations = "int8x2", scales: ModelScales | None = None
) -> IntegerModel:
    integers = quantize_model(model, "int8", activations, "scatter", scales).integers
    assert integers is not None
    return integers


def test_the_model_computes_with_the_dequantized_weights() -> None:
    model = tiny_model()
    integers = quantized(model)
    assert integers.limbs == 2
    for name, product in integers.layers.items():
        assert torch.equal(model.get_submodule(name).weight, product.dequantized.T)
    assert integers.embedding is not None
    assert torch.equal(model.get_input_embeddings().weight, integers.embedding.dequantized)


def test_a_tied_embedding_has_one_set_of_codes() -> None:
    model = build(next(family for family in FAMILIES if family.name == "gemma2"))
    assert model.config.tie_word_embeddings
    integers = quantized(model)
    assert integers.tied
    assert integers.embedding is not None
    assert integers.layers["lm_head"].codes.data_ptr() == integers.embedding.codes.data_ptr()
    assert integers.weights == sum(product.codes.numel() for product in integers.layers.values())


def test_two_limbs_change_logits_less_than_one() -> None:
    expected = logits(tiny_model())
    errors = {}
    for activations in ACTIVATIONS[:2]:
        model = tiny_model()
        integers = quantized(model, activations)
        weights_only = logits(model)
        inputs = QuantizedInputs(model, integers)
        errors[activations] = float((logits(model) - weights_only).abs().max())
        assert inputs.count > 0
        assert float((logits(model) - expected).abs().max()) < 0.2 * float(expected.abs().max())
    assert 0 < errors["int8x2"] < errors["int8"] / 20


def test_clipped_values_are_counted_by_module() -> None:
    name = "model.layers.0.self_attn.o_proj"
    scales = {key: LinearScales(product.input) for key, product in quantized(tiny_model()).layers.items()}
    model = tiny_model()
    inputs = QuantizedInputs(model, quantized(model, "int8x2", {**scales, name: LinearScales(InputScale(1e-4))}))
    logits(model)
    assert inputs.clipped.keys() == {name}
    assert inputs.clipped[name] > 0


def test_inputs_of_adapters_are_not_quantized() -> None:
    model = tiny_model()
    gate_model(model, [2], 4, 8.0, ["q_proj"])
    module = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(module, GatedLinear)
    module.B.data.fill_(0.5)
    QuantizedInputs(model, quantized(model, "int8"))
    states = torch.randn(1, 2, module.in_features, generator=torch.Generator().manual_seed(0))
    module.gate.rows = torch.tensor([[[False], [True]]])
    with torch.no_grad():
        got = module(states)
        base = module.base_input(states) @ module.weight.T
        added = states @ module.A.T @ (module.B * module.scale).T
    assert not torch.equal(module.base_input(states), states)
    assert torch.allclose(got[:, 0], base[:, 0], atol=1e-5)
    assert torch.allclose(got[:, 1], (base + added)[:, 1], atol=1e-4)


def test_scales_of_another_model_and_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(InputFault, match="no scale of lm_head: expected one for each of"):
        quantized(model, scales={})
    model.get_submodule("model.layers.0.mlp.up_proj").weight.data[0, 0] = torch.inf
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.up_proj: its weight holds infinities or NaN"):
        quantized(model)
