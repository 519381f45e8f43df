"""Quantize: a model computes with quantized weights and, if requested, with quantized activations."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.gated import GatedLinear, gate_model
from spaceport.graphs.int8 import InputScale, LinearScales
from spaceport.graphs.quantize import QuantizedInputs, quantize_model
from spaceport.graphs.traits import UnsupportedModel
from support.families import FAMILIES, build
from support.paths import TINY

NAMED = {family.name: family for family in FAMILIES}

IDS = torch.arange(3, 27)[None]


def tiny_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_model_computes_with_the_dequantized_weights() -> None:
    model = tiny_model()
    integers = quantize_model(model, "int8", "int8x2", "scatter").integers
    assert integers is not None
    assert integers.limbs == 2
    for name, product in integers.layers.items():
        assert torch.equal(model.get_submodule(name).weight, product.dequantized.T)
    assert integers.embedding is not None
    assert torch.equal(model.get_input_embeddings().weight, integers.embedding.dequantized)


def test_a_tied_embedding_has_one_set_of_codes() -> None:
    model = build(NAMED["gemma2"])
    assert model.config.tie_word_embeddings
    integers = quantize_model(model, "int8", "int8x2", "scatter").integers
    assert integers is not None
    assert integers.tied
    assert integers.embedding is not None
    head = integers.layers["lm_head"]
    assert head.codes.data_ptr() == integers.embedding.codes.data_ptr()
    assert integers.weights == sum(product.codes.numel() for product in integers.layers.values())


def test_two_limbs_change_logits_less_than_one() -> None:
    plain = tiny_model()
    expected = logits(plain)
    errors = {}
    for activations in ("int8x2", "int8"):
        model = tiny_model()
        integers = quantize_model(model, "int8", activations, "scatter").integers
        weights_only = logits(model)
        assert integers is not None
        inputs = QuantizedInputs(model, integers)
        errors[activations] = float((logits(model) - weights_only).abs().max())
        assert inputs.count > 0
        assert float((logits(model) - expected).abs().max()) < 0.2 * float(expected.abs().max())
    assert 0 < errors["int8x2"] < errors["int8"] / 20


def test_clipped_values_are_counted_by_module() -> None:
    model = tiny_model()
    found = quantize_model(model, "int8", "int8x2", "scatter").integers
    assert found is not None
    name = "model.layers.0.self_attn.o_proj"
    scales = {key: LinearScales(product.input) for key, product in found.layers.items()}
    scales[name] = LinearScales(InputScale(1e-4))
    again = tiny_model()
    integers = quantize_model(again, "int8", "int8x2", "scatter", scales).integers
    assert integers is not None
    inputs = QuantizedInputs(again, integers)
    logits(again)
    assert inputs.clipped.keys() == {name}
    assert inputs.clipped[name] > 0


def test_inputs_of_adapters_are_not_quantized() -> None:
    model = tiny_model()
    gate_model(model, [2], 4, 8.0, ["q_proj"])
    name = "model.layers.0.self_attn.q_proj"
    module = model.get_submodule(name)
    assert isinstance(module, GatedLinear)
    module.B.data.fill_(0.5)
    integers = quantize_model(model, "int8", "int8", "scatter").integers
    assert integers is not None
    QuantizedInputs(model, integers)
    states = torch.randn(1, 2, module.in_features, generator=torch.Generator().manual_seed(0))
    module.gate.rows = torch.tensor([[[False], [True]]])
    with torch.no_grad():
        got = module(states)
        base = module.base_input(states) @ module.weight.T
        added = states @ module.A.T @ (module.B * module.scale).T
    assert not torch.equal(module.base_input(states), states)
    assert torch.allclose(got[:, 0], base[:, 0], atol=1e-5)
    assert torch.allclose(got[:, 1], (base + added)[:, 1], atol=1e-4)


def test_scales_of_another_model_are_refused() -> None:
    with pytest.raises(InputFault, match="no scale of lm_head: expected one for each of"):
        quantize_model(tiny_model(), "int8", "int8x2", "scatter", {})


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    model.get_submodule("model.layers.0.mlp.up_proj").weight.data[0, 0] = torch.inf
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.up_proj: its weight holds infinities or NaN"):
        quantize_model(model, "int8", "int8x2", "scatter")
