"""GPTQ: errors on calibration texts are smaller than those of rounding, whatever the parts, and memory is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.gptq import CalibrationTexts, calibration_texts, kv_bytes, rounded_layers
from spaceport.graphs.quantization import QuantizedWeight, int4_format
from spaceport.graphs.quantize import linear_modules
from support.families import build, family_of
from support.paths import TINY

INT4 = int4_format(torch.float32)


def tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts() -> CalibrationTexts:
    with torch.no_grad():
        return calibration_texts(tiny(), (torch.tensor([[5, 6, 7, 8, 9]]),))


def inside(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear modules of the first layer."""
    return {name: module for name, module in linear_modules(model).items() if name.startswith("model.layers.0.")}


@torch.no_grad()
def rounded(model: PreTrainedModel, texts: CalibrationTexts) -> dict[str, QuantizedWeight]:
    return rounded_layers(model, inside(model), texts, INT4)[0]


@torch.no_grad()
def test_the_output_error_is_smaller_than_with_the_nearest_codes(texts: CalibrationTexts) -> None:
    model = tiny()
    inputs: dict[str, Tensor] = {}
    for name, module in inside(model).items():
        module.register_forward_pre_hook(lambda module, given, name=name: inputs.setdefault(name, given[0]))
    model(input_ids=texts.ids, attention_mask=texts.real.long(), use_cache=False)
    weights = {name: module.weight.clone() for name, module in inside(model).items()}
    found = rounded(model, texts)
    for name, weight in weights.items():
        rows = inputs[name][texts.real]
        nearest = INT4.nearest(weight).dequantized
        errors = [float((rows @ (form - weight.T)).norm()) for form in (found[name].dequantized, nearest)]
        assert errors[0] < 0.9 * errors[1], name
        assert torch.equal(model.get_submodule(name).weight, found[name].dequantized.T)


@torch.no_grad()
def test_a_layer_is_calibrated_behind_the_rounded_ones(texts: CalibrationTexts) -> None:
    model, seen = tiny(), []
    modules = {name: module for name, module in linear_modules(model).items() if "layers" in name}
    modules["model.layers.1.self_attn.q_proj"].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(input_ids=texts.ids, attention_mask=texts.real.long(), use_cache=False)
    before, seen[:] = seen[:], []
    rounded_layers(model, modules, texts, INT4)
    model(input_ids=texts.ids, attention_mask=texts.real.long(), use_cache=False)
    # of the measured run, of that with rounded weights, and of the rounded model
    measured, _, after = (states[texts.real] for states in seen)
    assert torch.allclose(measured, after, atol=1e-4)
    assert not torch.allclose(before[0][texts.real], after, atol=1e-4)


@torch.no_grad()
def test_a_wide_input_is_split_into_parts(texts: CalibrationTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rounded(tiny(), texts)
    monkeypatch.setattr("spaceport.graphs.gptq._WIDEST", 40)
    parts = rounded(tiny(), texts)
    for name, layer in whole.items():
        assert layer.codes.shape == parts[name].codes.shape
        assert 0 < int((layer.codes != parts[name].codes).sum()) < 0.5 * layer.codes.numel()


@torch.no_grad()
def test_errors_are_passed_on_equally_in_blocks_of_any_size(
    texts: CalibrationTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rounded(tiny(), texts)
    monkeypatch.setattr("spaceport.graphs.gptq._BLOCK", 7)
    blocks = rounded(tiny(), texts)
    for name, layer in whole.items():  # sums in another order may cross the middle between two codes
        assert int((layer.codes != blocks[name].codes).sum()) <= 0.01 * layer.codes.numel()


@torch.no_grad()
def test_padding_does_not_count(texts: CalibrationTexts) -> None:
    other = CalibrationTexts(torch.where(texts.real, texts.ids, 50), texts.real)
    assert not torch.equal(other.ids, texts.ids)
    for name, layer in rounded(tiny(), texts).items():
        assert torch.equal(rounded(tiny(), other)[name].codes, layer.codes)
        break


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "opt", "mixtral", "falcon, 7B style"])
def test_all_layers_of_other_families_are_rounded(name: str) -> None:
    model = build(family_of(name))
    modules, done = linear_modules(model), []
    found, errors = rounded_layers(
        model, modules, calibration_texts(model), INT4, lambda *progress: done.append(progress)
    )
    assert found.keys() == modules.keys() == errors.keys()
    assert all(0 < error < 0.3 for error in errors.values())
    assert done == [("quantized {} of {} layers", number, 2) for number in (1, 2)]


@torch.no_grad()
def test_layers_that_are_not_chained_get_the_nearest_codes(
    texts: CalibrationTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    monkeypatch.setattr(
        "spaceport.graphs.gptq.decoder_layers", lambda model, count: (*model.model.layers[1:], *model.model.layers[:1])
    )
    modules = inside(model)
    weights = {name: module.weight.clone() for name, module in modules.items()}
    found, _ = rounded_layers(model, modules, texts, INT4)
    for name, weight in weights.items():
        assert torch.equal(found[name].codes, INT4.nearest(weight).codes)


@torch.no_grad()
def test_texts_have_the_prompts_and_no_excluded_token() -> None:
    model = tiny()
    before = calibration_texts(model)
    assert torch.equal(calibration_texts(model).ids, before.ids)
    excluded = sorted({int(token) for token in before.ids.flatten()} - {5, 6, 7})[-5:]
    after = calibration_texts(model, (torch.tensor([[5, 6, 7]]),), excluded)
    assert not {int(token) for token in after.ids[after.real]} & {*excluded}
    starts = [text[real][:3].tolist() for text, real in zip(after.ids, after.real, strict=True)]
    assert starts.count([5, 6, 7]) >= 3
    assert int(after.real.sum()) > 2000


@torch.no_grad()
def test_texts_stay_within_the_positions_of_the_model() -> None:
    model = build(family_of("opt"))  # learned positions: longer texts are an error
    positions = model.config.max_position_embeddings
    texts = calibration_texts(model, (torch.arange(positions + 40)[None] % 60,))
    assert int(texts.real.sum(dim=1).max()) <= positions


@torch.no_grad()
def test_a_model_with_large_keys_and_values_gets_fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    prompts = tuple(torch.full((1, 5), token) for token in range(5, 25))
    everything = calibration_texts(model, prompts)
    assert len(everything.ids) == 64
    monkeypatch.setattr("spaceport.graphs.gptq._MEMORY", 20 * everything.ids.shape[1] * kv_bytes(model))
    assert len(calibration_texts(model, prompts).ids) == 20
    monkeypatch.setattr("spaceport.graphs.gptq._MEMORY", 1)
    assert len(calibration_texts(model, prompts).ids) == 8
