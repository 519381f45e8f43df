"""Calibration: modules share input scales, static ranges cover the data, inputs with outliers get dynamic scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.calibration import _sampled_rows, calibrate, calibration_texts
from spaceport.graphs.int8 import InputScale, quantize_linear
from spaceport.graphs.quantize import integer_modules
from support.families import FAMILIES, build
from support.paths import TINY

NAMED = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def scales_of(model: PreTrainedModel, limbs: int = 2, tied: frozenset[str] = frozenset()) -> dict[str, InputScale]:
    found = calibrate(model, integer_modules(model), calibration_texts(model), limbs, tied)
    return {name: scale.input for name, scale in found.items()}


def test_every_layer_has_scales_and_layers_with_the_same_input_share_its_scale(tiny: PreTrainedModel) -> None:
    scales = scales_of(tiny)
    assert scales.keys() == integer_modules(tiny).keys()
    layer = "model.layers.0."
    assert scales[f"{layer}self_attn.q_proj"] is scales[f"{layer}self_attn.k_proj"]
    assert scales[f"{layer}self_attn.q_proj"] is scales[f"{layer}self_attn.v_proj"]
    assert scales[f"{layer}mlp.gate_proj"] is scales[f"{layer}mlp.up_proj"]
    assert len({id(scale) for name, scale in scales.items() if layer in name}) == 4
    assert all(scale.clip is None for scale in scales_of(tiny, limbs=1).values())
    assert scales_of(tiny, tied=frozenset({"lm_head"}))["lm_head"].smoothing is None


def test_inputs_behind_norms_have_static_ranges_that_cover_the_calibrated_values(tiny: PreTrainedModel) -> None:
    scales, modules, recorded = scales_of(tiny), integer_modules(tiny), {}

    def record(name: str) -> object:
        return lambda module, given: recorded.__setitem__(name, given[0])

    handles = [module.register_forward_pre_hook(record(name)) for name, module in modules.items()]  # type: ignore[arg-type]
    for text in calibration_texts(tiny):
        with torch.no_grad():
            tiny(input_ids=text)
        for name, states in recorded.items():
            scale = scales[name]
            if scale.clip is not None:
                smoothed = states if scale.smoothing is None else states / scale.smoothing
                assert float(smoothed.abs().max()) <= scale.clip
    for handle in handles:
        handle.remove()
    assert all(scales[name].clip is not None for name in scales if "q_proj" in name or "gate_proj" in name)
    scale = scales["model.layers.0.self_attn.q_proj"]
    gain = tiny.get_submodule("model.layers.0.input_layernorm").weight.detach().abs()
    most = math.sqrt(gain.numel()) * float((gain if scale.smoothing is None else gain / scale.smoothing).max())
    assert scale.clip is not None
    assert scale.clip <= most * 1.0001  # the largest output of the norm


def test_an_input_with_outlier_rows_has_a_dynamic_scale(tiny: PreTrainedModel) -> None:
    scales = scales_of(tiny)
    name = next(name for name, scale in scales.items() if "o_proj" in name and scale.clip is not None)

    def enlarge(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        size = torch.ones((*given[0].shape[:2], 1))
        size[0, 0] = 1000.0
        return (given[0] * size,)

    handle = tiny.get_submodule(name).register_forward_pre_hook(enlarge)
    found = scales_of(tiny)
    handle.remove()
    assert found[name].clip is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
def test_norms_are_recognized_by_their_output(family: str) -> None:
    model = build(NAMED[family])
    behind_norms = [scale for name, scale in scales_of(model).items() if "0." in name]
    assert any(scale.clip is not None for scale in behind_norms)


def test_calibration_texts_have_the_prompts_and_no_excluded_token(tiny: PreTrainedModel) -> None:
    (before,) = calibration_texts(tiny)
    excluded = sorted({int(token) for token in before.flatten()})[:5]
    after, prompted = calibration_texts(tiny, (torch.tensor([[5, 6, 7]]),), excluded)
    assert not {int(token) for token in after.flatten()} & {*excluded}
    assert prompted[0, :3].tolist() == [5, 6, 7]
    assert prompted.shape[1] > 3
    vocab = int(tiny.config.vocab_size)
    assert [text.tolist() for text in calibration_texts(tiny, excluded=range(vocab, vocab + 9))] == [before.tolist()]


def test_calibration_texts_stay_within_the_positions_of_the_model() -> None:
    model = build(NAMED["opt"])  # learned positions: longer texts are an error
    positions = model.config.max_position_embeddings
    texts = calibration_texts(model, (torch.arange(positions + 40)[None] % 60,))
    assert [text.shape[1] <= positions for text in texts] == [True, True]
    assert texts[1].shape[1] > 40


def test_calibrating_and_quantizing_in_parts_gives_the_same_result(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, modules = calibration_texts(tiny), integer_modules(tiny)
    whole = calibrate(tiny, modules, texts, 2, frozenset())
    layers = {name: quantize_linear(module.weight, whole[name]) for name, module in modules.items()}
    monkeypatch.setattr("spaceport.graphs.streamed_weights._PART", 500)
    parts = calibrate(tiny, modules, texts, 2, frozenset())
    assert any(scale.input.smoothing is not None for scale in parts.values())
    for name, module in modules.items():
        assert (parts[name].input.clip, str(parts[name])) == (whole[name].input.clip, str(whole[name]))
        in_parts = quantize_linear(module.weight, parts[name])
        assert torch.equal(in_parts.codes, layers[name].codes)
        assert torch.equal(in_parts.scale, layers[name].scale)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        states = torch.ones(1, input_ids.shape[1], 8)
        for layer in self.layers:
            states = layer(states) * 2
        return states

    def get_output_embeddings(self) -> nn.Module:
        return self.layers[3]


def test_a_tensor_at_the_address_of_a_freed_one_is_another_input() -> None:
    """Python gives the `id` of a freed tensor to the next one; the two layers then do not share a scale."""
    model: Any = Chain()
    modules = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    found = calibrate(model, modules, [torch.zeros(1, 5, dtype=torch.long)], 1, frozenset())
    assert len({id(scale.input) for scale in found.values()}) == 4


def test_sampled_rows_are_evenly_spaced_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spaceport.graphs.streamed_weights._PART", 70)  # 10 rows
    weight = torch.arange(1025 * 7.0).reshape(1025, 7)
    assert torch.equal(_sampled_rows(weight), weight[::4])
