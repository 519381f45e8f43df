"""Rotation: logits stay, outliers vanish, and what cannot be rotated is recognized without values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_source import model_without_values
from spaceport.graphs.gated import GatedLinear, gate_model
from spaceport.graphs.heads import Heads, expected_shapes, head_logits
from spaceport.graphs.mechanism import Factors, InputRows
from spaceport.graphs.rotation import NotRotatable, block_size, hadamard, is_rotatable, orthogonal, rotate_model
from spaceport.graphs.traits import UnsupportedModel
from support.families import FAMILIES, Family, build, family_of

ROTATABLE = {
    *("llama", "llama, llama3 rope", "llama, linear rope", "llama, dynamic rope", "llama, yarn rope"),
    *("qwen2", "qwen3", "mistral", "ministral3", "phi3", "phi3, longrope", "glm", "internlm3", "gemma", "granite"),
    *("smollm3", "qwen3_moe", "mixtral"),
}
MASK = 96


def logits(model: PreTrainedModel, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(3, 27)[None] if ids is None else ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("size", [2, 12, 36, 128, 576, 896])
def test_the_matrix_is_orthogonal_and_spreads_an_outlier(size: int) -> None:
    rotation = orthogonal(size)
    assert torch.allclose(rotation.matrix @ rotation.matrix.T, torch.eye(size, dtype=torch.float64))
    assert torch.equal(orthogonal(size).matrix, rotation.matrix)
    assert float(rotation.matrix.abs().max()) <= 3.2 / size**0.5 or size < 64


def test_blocks_are_powers_of_two_that_divide_the_width() -> None:
    assert [block_size(width) for width in (1536, 48, 96, 4864, 12)] == [128, 16, 32, 128, None]
    assert torch.allclose(hadamard(16) @ hadamard(16), torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_rotated_model_has_the_same_logits_or_is_refused(family: Family) -> None:
    """Without values, the same families are recognized."""
    model = build(family)
    assert is_rotatable(model_without_values(model.config, "float32")) == (family.name in ROTATABLE)
    if family.name not in ROTATABLE:
        with pytest.raises(NotRotatable, match=f"{type(model).__name__} cannot be rotated: "):
            rotate_model(model)
        return
    expected = logits(model)
    embedding = model.get_input_embeddings().weight.detach().clone()
    rotation = rotate_model(model)
    assert float((logits(model) - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
    rotated = model.get_input_embeddings().weight
    assert torch.allclose(rotated, rotation.times(embedding).float(), atol=1e-5)
    assert not torch.allclose(rotated, embedding, atol=0.1 * float(embedding.std()))


def largest_to_rms(model: PreTrainedModel, name: str) -> float:
    """The largest input of a module relative to the root mean square of its row, over all rows."""
    found = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, given: found.append(given[0][0]))
    logits(model)
    handle.remove()
    return max(float(row.abs().max() / row.square().mean().sqrt()) for row in found[0])


@pytest.mark.parametrize(
    ("module", "outlier"),
    [
        ("model.layers.1.mlp.up_proj", lambda model: model.get_input_embeddings().weight[:, 3]),
        ("model.layers.1.self_attn.o_proj", lambda model: model.model.layers[1].self_attn.v_proj.weight[2]),
        ("model.layers.1.mlp.down_proj", lambda model: model.model.layers[1].mlp.up_proj.weight[5]),
    ],
)
def test_outliers_are_spread_over_all_channels(module: str, outlier: Callable[[PreTrainedModel], Tensor]) -> None:
    model = build(family_of("llama"))
    outlier(model).data.mul_(100)
    before = largest_to_rms(model, module)
    rotate_model(model)
    after = []
    model.get_submodule(module).register_forward_pre_hook(lambda module, given: after.append(given[0][0]))
    logits(model)
    assert max(float(row.abs().max() / row.square().mean().sqrt()) for row in after[0]) < 0.8 * before


def test_adapters_are_rotated_with_the_stream() -> None:
    model = build(family_of("llama"))
    gate_model(model, [MASK], 4, 8.0, ["all-linear"])
    for module in model.modules():
        if isinstance(module, GatedLinear):
            module.B.data.normal_(generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[3, 4, MASK, 5, MASK]])
    plain, expected = logits(model, torch.tensor([[3, 4, 6, 5, 7]])), logits(model, ids)
    rotate_model(model)
    assert not torch.allclose(plain[:, 2], expected[:, 2], atol=0.1)
    assert torch.allclose(logits(model, ids), expected, atol=1e-4 * float(expected.abs().max()))


def test_input_rows_are_rotated_with_the_embeddings() -> None:
    model = build(family_of("gemma"))  # scales its embeddings
    rows = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[3, 4, MASK, 5]])
    before = logits(model, ids)
    InputRows((MASK,), rows).apply(model)
    expected = logits(model, ids)
    assert not torch.allclose(before, expected, atol=0.1)
    rotate_model(model)
    assert torch.allclose(logits(model, ids), expected, atol=1e-4 * float(expected.abs().max()))


def test_draft_heads_read_the_hidden_state_as_before() -> None:
    model = build(family_of("llama"))
    model.model.norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    shapes = expected_shapes(2, 1, model.config.hidden_size, model.config.vocab_size)
    Heads(2, 1, {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}).apply(model)
    with head_logits(model) as before:
        logits(model)
    expected = [found.clone() for found in before]
    rotate_model(model)
    with head_logits(model) as after:
        logits(model)
    for found, other in zip(after, expected, strict=True):
        assert torch.allclose(found, other, atol=1e-4 * float(other.abs().max()))


def test_the_tables_of_a_draft_correction_stay() -> None:
    rotation = orthogonal(36)
    embeddings, factors = torch.randn(11, 36), Factors(torch.randn(36, 4), torch.randn(36, 4))
    rotated = factors.rotated(rotation).tables(rotation.times(embeddings))
    for found, expected in zip(rotated, factors.tables(embeddings), strict=True):
        assert torch.allclose(found, expected, atol=1e-4)
    assert factors.rotated(None) is factors


def test_a_model_whose_logits_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spaceport.graphs.rotation._rotate_values", lambda model, found: model.lm_head.weight.data.mul_(2)
    )
    with pytest.raises(UnsupportedModel, match=r"change by .* when its weights are rotated: .*--activations int8x2"):
        rotate_model(build(family_of("llama")))
