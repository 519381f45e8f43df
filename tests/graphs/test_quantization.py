"""Quantization: errors are within a step, rows do not depend on each other, and a model computes with the quantized numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import Weights
from spaceport.graphs.gated import GatedLinear, gate_model
from spaceport.graphs.quantization import (
    BLOCKS,
    INPUT_BLOCK,
    INT8_MAX,
    QuantizedWeight,
    block_of,
    fake_quantize,
    quantize_model,
    weight_format,
)
from spaceport.graphs.traits import UnsupportedModel
from spaceport.verify.quantization import agreement
from support.families import FAMILIES, build
from support.paths import TINY

FORMATS: tuple[Weights, ...] = ("int4", "float8")
NAMED = {family.name: family for family in FAMILIES}


def random_weight(seed: int, rows: int, inputs: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix (outputs x inputs), whose last row is zero if there are others."""
    weight = size * torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) ** 3
    weight[1:][-1:] = 0
    return weight.to(dtype)


SIZES = st.sampled_from((1e-6, 1e-3, 0.02, 1.0, 100.0))
matrices = st.builds(random_weight, st.integers(0, 1 << 30), st.integers(1, 9), st.sampled_from((8, 32, 96)), SIZES)
weights = st.builds(
    random_weight,
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.sampled_from((32, 64, 96, 256)),
    SIZES,
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)


def quantized(weight: Tensor, kind: Weights) -> QuantizedWeight:
    return weight_format(kind, weight.dtype).nearest(weight)


def steps(found: QuantizedWeight) -> Tensor:
    """The scale of every weight: inputs x outputs."""
    scale = found.scale.float()
    return scale.expand(found.codes.shape) if found.block is None else scale.repeat_interleave(found.block, 0)


def slack(weight: Tensor) -> Tensor:
    """The error from rounding a dequantized weight to the model's dtype."""
    info = torch.finfo(weight.dtype)
    return weight.T.float().abs() * info.eps + info.tiny * info.eps


@pytest.mark.parametrize(("kind", "least", "most"), [("int4", -8, 7), ("int8", -127, 127)])
@settings(max_examples=60)
@given(weight=weights)
def test_the_error_of_a_weight_is_at_most_half_a_step_unless_it_is_clipped(
    kind: Weights, least: int, most: int, weight: Tensor
) -> None:
    found = quantized(weight, kind)
    error, step = (found.dequantized.float() - weight.T.float()).abs(), steps(found)
    inside = (found.codes > least) & (found.codes < most) if kind == "int4" else found.codes.abs() <= most
    assert bool((error <= 0.5001 * step + slack(weight))[inside].all())
    assert least <= found.codes.min() <= found.codes.max() <= most
    assert bool((step > 0).all())
    assert len(weight) == 1 or not found.dequantized.T[-1].any()  # zeros stay zeros


@settings(max_examples=60)
@given(weights)
def test_searched_scales_are_never_worse_than_scales_that_clip_nothing(weight: Tensor) -> None:
    found = quantized(weight, "int4")
    assert found.block is not None
    blocks = weight.T.float().reshape(-1, found.block, len(weight))
    scale = torch.maximum(blocks.amax(1) / 7, blocks.amin(1) / -8).clamp(min=torch.finfo(weight.dtype).tiny)
    scale = scale.to(weight.dtype).float()[:, None]
    plain = ((blocks / scale).round().clamp(-8, 7) * scale - blocks).square().sum(1)
    exact = (found.codes.float() * steps(found) - weight.T.float()).reshape(blocks.shape).square().sum(1)
    assert bool((exact <= plain * 1.001 + 1e-30).all())


@settings(max_examples=60)
@given(weights)
def test_the_error_of_a_float8_weight_is_at_most_a_sixteenth_or_half_the_smallest_step(weight: Tensor) -> None:
    found = quantized(weight, "float8")
    error = (found.dequantized.float() - weight.T.float()).abs()
    assert bool((error <= weight.T.float().abs() / 16 + 2.0**-10 * steps(found) * 1.01 + slack(weight)).all())
    assert bool(torch.isfinite(found.codes.float()).all())
    assert len(weight) == 1 or not found.dequantized.T[-1].any()


@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (192, 64), (96, 32), (48, None)])
def test_the_block_size_divides_the_number_of_inputs(inputs: int, block: int | None) -> None:
    assert block_of(inputs, BLOCKS) == block


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
def test_searching_scales_in_parts_gives_the_same_result(kind: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    whole = quantized(weight, kind)
    monkeypatch.setattr("spaceport.graphs.streamed_weights._PART", 128)
    parts = quantized(weight, kind)
    assert torch.equal(whole.codes.float(), parts.codes.float())
    assert torch.equal(whole.scale, parts.scale)


def tiny() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_computes_with_quantized_weights_and_the_others_are_unchanged(kind: Weights) -> None:
    model, before = tiny(), tiny().state_dict()
    quantization = quantize_model(model, kind)
    assert quantization.quantized_weights == 239_616
    assert len(quantization.layers) == 7 * 3
    for name, weight in model.state_dict().items():
        layer = quantization.layers.get(name.removesuffix(".weight"))
        assert torch.equal(weight, before[name] if layer is None else layer.dequantized.T)
    assert not any("embed" in name or "lm_head" in name for name in quantization.layers)


def test_weights_that_two_modules_share_and_adapters_are_not_quantized() -> None:
    model, plain = tiny(), tiny()
    expected = quantize_model(plain, "int4").layers.keys()
    gate_model(model, [4], 3, 6, ["q_proj"])
    model.requires_grad_(False)
    gated = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(gated, GatedLinear)
    before, adapter = gated.weight.clone(), gated.A.clone()
    shared = {f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)}
    one, other = (model.get_submodule(name) for name in sorted(shared))
    other.weight = one.weight
    assert quantize_model(model, "int4").layers.keys() == expected - shared
    assert not torch.equal(gated.weight, before)
    assert torch.equal(gated.A, adapter)


def test_experts_that_are_not_linear_modules_are_not_quantized() -> None:
    model = build(NAMED["mixtral"]).requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items() if "experts" in name}
    layers = quantize_model(model, "int4").layers
    assert layers
    assert all("self_attn" in name for name in layers)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in before.items())


@pytest.mark.parametrize("kind", [*FORMATS, "int8"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_error_for_non_finite_weights_names_the_layer(kind: Weights, value: float) -> None:
    model = tiny()
    model.get_submodule("model.layers.1.mlp.down_proj").weight[3, 5] = value  # type: ignore[operator]
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.down_proj: its weight holds infinities or NaN"):
        quantize_model(model, kind)


def test_a_model_without_quantizable_layers_is_refused() -> None:
    with pytest.raises(OptionFault, match=r"weights are int4: GPT2LMHeadModel has no linear layer .*--format float16"):
        quantize_model(build(NAMED["gpt2"]), "int4")


def test_agreement_counts_rows_and_measures_divergence() -> None:
    expected = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).double().log()
    got = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).double().log()
    found = agreement("int4", expected, got)
    assert (found.rows, found.agreeing) == (2, 1)
    assert found.divergence == pytest.approx(0.125 * torch.log(torch.tensor(2.0)).item())
    assert str(found).startswith(
        "format int4: top-1 agreement with the unquantized model 50.0 % of 2 rows, mean KL 0.08"
    )


def largest_of_blocks(states: Tensor) -> Tensor:
    """The largest magnitude of the block of each input."""
    parts = [part.abs().amax(dim=-1, keepdim=True).expand(part.shape) for part in states.split(INPUT_BLOCK, dim=-1)]
    return torch.cat(parts, dim=-1)


@settings(max_examples=40)
@given(matrices)
def test_the_error_of_an_input_is_at_most_half_a_step_of_its_block(states: Tensor) -> None:
    step = (largest_of_blocks(states) / INT8_MAX).clamp(min=1e-37)  # of blocks of zeros
    rounded = fake_quantize(states)
    assert bool(((rounded - states).abs() <= 0.501 * step).all())
    assert bool((((rounded / step).round() * step - rounded).abs() <= 1e-5 * step * INT8_MAX).all())


def test_blocks_of_zeros_stay_zero_and_numbers_that_are_not_finite_stay_in_their_block() -> None:
    states = torch.zeros(2, 3 * INPUT_BLOCK)
    states[0, 40], states[1, 70], states[1, 0] = float("nan"), float("inf"), 1e-31
    rounded = fake_quantize(states)
    assert rounded[0, INPUT_BLOCK : 2 * INPUT_BLOCK].isnan().all()
    assert rounded[1, 2 * INPUT_BLOCK :].isnan().any()
    assert not rounded[0, :INPUT_BLOCK].any()
    assert not rounded[0, 2 * INPUT_BLOCK :].any()
    assert not rounded[1, : 2 * INPUT_BLOCK].any()


@settings(max_examples=40)
@given(matrices, st.integers(0, 8))
def test_a_row_is_rounded_equally_alone_and_with_other_rows(states: Tensor, row: int) -> None:
    row %= len(states)
    assert torch.equal(fake_quantize(states)[row : row + 1], fake_quantize(states[row : row + 1]))
