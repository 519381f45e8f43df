"""Calibration: modules that share rows share a scale, fixed scales hold what was seen, outliers get scales per row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.calibration import calibrate, calibration_texts
from spaceport.graphs.int8 import InputScale
from spaceport.graphs.quantize import integer_modules
from support.families import FAMILIES, build
from support.paths import TINY

NAMED = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def scales_of(model: PreTrainedModel, limbs: int = 2, fixed: frozenset[str] = frozenset()) -> dict[str, InputScale]:
    found = calibrate(model, integer_modules(model), calibration_texts(model), limbs, fixed)
    return {name: scale.input for name, scale in found.items()}


def test_every_product_has_a_scale_and_those_of_the_same_rows_share_it(tiny: PreTrainedModel) -> None:
    scales = scales_of(tiny)
    assert scales.keys() == integer_modules(tiny).keys()
    layer = "model.layers.0."
    assert scales[f"{layer}self_attn.q_proj"] is scales[f"{layer}self_attn.k_proj"]
    assert scales[f"{layer}self_attn.q_proj"] is scales[f"{layer}self_attn.v_proj"]
    assert scales[f"{layer}mlp.gate_proj"] is scales[f"{layer}mlp.up_proj"]
    assert len({id(scale) for name, scale in scales.items() if layer in name}) == 4


def test_inputs_behind_norms_have_fixed_scales_that_hold_what_was_seen(tiny: PreTrainedModel) -> None:
    scales, modules, seen = scales_of(tiny), integer_modules(tiny), {}

    def note(name: str) -> object:
        return lambda module, given: seen.__setitem__(name, given[0])

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]  # type: ignore[arg-type]
    for text in calibration_texts(tiny):
        with torch.no_grad():
            tiny(input_ids=text)
        for name, states in seen.items():
            scale = scales[name]
            if scale.clip is not None:
                moved = states if scale.smoothing is None else states / scale.smoothing
                assert float(moved.abs().max()) <= scale.clip
    for handle in handles:
        handle.remove()
    assert all(scales[name].clip is not None for name in scales if "q_proj" in name or "gate_proj" in name)


def test_a_fixed_scale_does_not_exceed_what_a_norm_can_give(tiny: PreTrainedModel) -> None:
    name = "model.layers.0.self_attn.q_proj"
    scale = scales_of(tiny)[name]
    gain = tiny.get_submodule("model.layers.0.input_layernorm").weight.detach().abs()
    assert scale.clip is not None
    most = math.sqrt(gain.numel()) * float((gain if scale.smoothing is None else gain / scale.smoothing).max())
    assert scale.clip <= most * 1.0001


def test_an_input_with_rare_large_values_is_scaled_row_by_row(tiny: PreTrainedModel) -> None:
    usual = scales_of(tiny)
    name = next(name for name, scale in usual.items() if "o_proj" in name and scale.clip is not None)

    def enlarge(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        size = torch.ones((*given[0].shape[:2], 1))
        size[0, 0] = 1000.0
        return (given[0] * size,)

    handle = tiny.get_submodule(name).register_forward_pre_hook(enlarge)
    found = scales_of(tiny)
    handle.remove()
    assert found[name].clip is None


def test_one_limb_has_a_scale_for_each_row(tiny: PreTrainedModel) -> None:
    assert all(scale.clip is None for scale in scales_of(tiny, limbs=1).values())


def test_channels_stay_as_they_are_where_weights_have_another_use(tiny: PreTrainedModel) -> None:
    assert scales_of(tiny, fixed=frozenset({"lm_head"}))["lm_head"].smoothing is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
def test_norms_are_known_by_what_they_give(family: str) -> None:
    model = build(NAMED[family])
    behind_norms = [scale for name, scale in scales_of(model).items() if "0." in name]
    assert any(scale.clip is not None for scale in behind_norms)


def test_calibration_texts_begin_with_the_prompts(tiny: PreTrainedModel) -> None:
    _, text = calibration_texts(tiny, (torch.tensor([[5, 6, 7]]),))
    assert text[0, :3].tolist() == [5, 6, 7]
    assert text.shape[1] > 3


def test_texts_stay_within_the_positions_of_the_model() -> None:
    model = build(NAMED["opt"])  # learned positions: a longer text would be an error
    positions = model.config.max_position_embeddings
    texts = calibration_texts(model, (torch.arange(positions + 40)[None] % 60,))
    assert [text.shape[1] <= positions for text in texts] == [True, True]
    assert texts[1].shape[1] > 40
