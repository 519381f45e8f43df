"""Streamed weights hold values only while their layer runs, and a use without values is visible in the result."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.streamed_weights import (
    Streamed,
    in_parts,
    keep_values,
    on_disk,
    read_when_called,
    replace_values,
    rows_of,
    stream,
    transposed_values_of,
    values_of,
)
from spaceport.graphs.traits import UnsupportedModel, decoder_layers
from support.gguf_files import HIDDEN, random_model


def source_with(values: Tensor, folder: Path) -> Streamed:
    """A source of these values."""
    return Streamed(partial(in_parts, values.shape, values.clone().__getitem__), folder)


def parameter(values: Tensor, folder: Path) -> nn.Parameter:
    """A streamed parameter with these values."""
    found = nn.Parameter(values.clone(), requires_grad=False)
    stream(found, source_with(values, folder))
    return found


def small_model() -> PreTrainedModel:
    return random_model("llama", tied=False).requires_grad_(False)


def streamed_model(folder: Path) -> PreTrainedModel:
    model = small_model()
    for tensor in [tensor for tensor in model.parameters() if tensor.dim() > 1]:
        stream(tensor, source_with(tensor.detach(), folder))
    return model


def test_only_the_layer_that_runs_has_values_in_memory_that_the_layers_share(tmp_path: Path) -> None:
    model = streamed_model(tmp_path)
    read_when_called(model, layers := decoder_layers(model, 2))
    loaded: list[list[int]] = []
    used: list[int] = []

    def record(module: nn.Module, arguments: object) -> None:
        present = [i for i, layer in enumerate(layers) if not any(p.isnan().any() for p in layer.parameters())]
        loaded.append([*present, *([9] if not model.lm_head.weight.isnan().any() else [])])
        used.extend(next(layers[layer].parameters()).untyped_storage().data_ptr() for layer in present)

    for layer in layers:
        layer.mlp.register_forward_pre_hook(record)
    model.lm_head.register_forward_pre_hook(record)
    ids = torch.arange(10)[None]
    assert torch.equal(model(ids).logits, small_model()(ids).logits)
    assert loaded == [[0], [1], [9]]
    assert (len(used), len(set(used))) == (2, 1)
    matrices = [tensor for tensor in model.parameters() if tensor.dim() > 1]
    assert all(tensor.isnan().all() and tensor.untyped_storage().nbytes() == 4 for tensor in matrices)
    (release,) = model._forward_hooks.values()
    assert release.__self__._memory.numel() == 0  # type: ignore[attr-defined]


def test_a_layer_computes_the_same_inside_another_module_and_without_its_model(tmp_path: Path) -> None:
    """The parameters of the outer module stay unchanged while the inner one has values."""
    plain, model = small_model(), streamed_model(tmp_path)
    for one in (plain, model):
        one.model.register_parameter("gain", nn.Parameter(torch.full((3, 5), 2.0), requires_grad=False))
        one.model.norm.register_forward_hook(
            lambda module, arguments, output, owner=one.model: output * owner.gain[2, 4]
        )
    stream(model.model.gain, source_with(torch.full((3, 5), 2.0), tmp_path))
    read_when_called(model, decoder_layers(model, 2))
    ids = torch.arange(10)[None]
    for _ in range(2):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    hidden = torch.ones(1, 4, HIDDEN)
    assert torch.equal(model.lm_head(hidden), plain.lm_head(hidden))


@pytest.mark.parametrize("shape", [(5, 1 << 18), (5, 1 << 17), (1000, 1000), (7, 3, 1 << 16), (1, 1)])
def test_the_parts_of_a_parameter_are_its_rows_in_order(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.rand(shape)
    for tensor in (parameter(values, tmp_path), values):
        parts = list(rows_of(tensor))
        assert torch.equal(torch.cat([part for _, part in parts]), values)
        assert all(torch.equal(values[rows], part) for rows, part in parts)
        assert max(part.numel() for _, part in parts) <= max(1 << 18, values[0].numel())


def test_a_model_that_uses_a_weight_outside_of_its_layer_is_refused(tmp_path: Path) -> None:
    model = streamed_model(tmp_path)
    read_when_called(model, decoder_layers(model, 2)[:1])
    for layer in decoder_layers(model, 2)[1:]:
        for module in layer.modules():
            module._forward_pre_hooks.clear()
    with pytest.raises(UnsupportedModel, match="logits of LlamaForCausalLM as a graph differ"):
        decoder_of(model, "scatter", "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_tensor_on_disk_equals_the_original_and_leaves_no_file(dtype: torch.dtype, tmp_path: Path) -> None:
    original = torch.arange(-60, 60).reshape(8, 15).to(dtype)
    stored = on_disk(original.T, tmp_path)
    assert stored.dtype == dtype
    assert torch.equal(stored.float(), original.T.float())
    assert not list(tmp_path.iterdir())


def test_replaced_values_are_computed_when_they_are_read(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    weight, plain = parameter(values, tmp_path), nn.Parameter(values.clone())
    assert torch.equal(transposed_values_of(weight), values.T)
    for tensor in (weight, plain):
        replace_values(tensor, lambda rows: torch.full((3, 2), 0.5, dtype=torch.float64).T[rows])
        assert torch.equal(values_of(tensor), torch.full((2, 3), 0.5))
    assert weight.isnan().all()
    assert values_of(weight).is_contiguous()


def test_values_that_were_moved_into_memory_can_be_changed(tmp_path: Path) -> None:
    weight = parameter(torch.ones(2, 3), tmp_path)
    keep_values(weight)
    weight.data[0] = 2
    assert values_of(weight).sum() == 9
