"""The parts of a decoder: found in every family that native operators compute, verified by logits, refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spaceport.graphs.decoder import freeze_rotary
from spaceport.graphs.find_parts import UnsupportedParts, _Finder, parts_of
from spaceport.graphs.parts import DecoderParts, LayerParts
from spaceport.graphs.traits import Traits, probe
from support.native_models import REFUSED, SUPPORTED, built, found_parts


@cache
def probed(name: str) -> tuple[PreTrainedModel, Traits]:
    model = built(name)
    with torch.no_grad():
        traits = probe(model)
    freeze_rotary(model)
    return model, traits


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_parts_of_a_family_have_the_logits_of_the_unmodified_model(name: str) -> None:
    model, traits = probed(name)
    parts = parts_of(model, traits)
    ids = torch.randint(0, traits.vocab_size, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        logits = parts.logits(ids, 0)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert [len(parts.layers), parts.kv_heads, parts.head_dim, parts.window] == [
        traits.layers,
        traits.kv_heads,
        traits.head_dim,
        traits.window,
    ]


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_family_without_these_parts_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedParts, match=reason):
        found_parts(built(name))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3", {"head_dim": 12}, "heads of size 12: expected a multiple of 8"),
        ("gpt_neox", {"intermediate_size": 88}, r"dense_4h_to_h with 88 inputs: expected a multiple of 32"),
        ("mistral", {"hidden_size": 72}, "q_proj with 72 inputs: expected a multiple of 32"),
        ("llama", {"hidden_act": "relu"}, "the activation ReLU: expected gelu, gelu_tanh, silu"),
    ],
)
def test_sizes_and_activations_of_no_operator_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedParts, match=reason):
        found_parts(built(name, **changes))


Fault = Callable[[DecoderParts], DecoderParts]


def in_layer(index: int, change: Callable[[LayerParts], LayerParts]) -> Fault:
    def faulty(parts: DecoderParts) -> DecoderParts:
        layers = [change(layer) if index == number else layer for number, layer in enumerate(parts.layers)]
        return replace(parts, layers=tuple(layers))

    return faulty


def gain(layer: LayerParts) -> LayerParts:
    assert layer.mlp_norm is not None
    changed = layer.mlp_norm.gain.clone()
    changed[3] *= 1.05
    return replace(layer, mlp_norm=replace(layer.mlp_norm, gain=changed))


def faster(parts: DecoderParts) -> DecoderParts:
    rotations = [replace(rotation, frequencies=rotation.frequencies * 1.001) for rotation in parts.rotations]
    return replace(parts, rotations=tuple(rotations))


FAULTS: dict[str, tuple[str, Fault]] = {
    "the gain of a norm": ("llama", in_layer(1, gain)),
    "the kind of a norm": ("gpt_neox", lambda parts: replace(parts, norm=replace(parts.norm, kind="rms"))),
    "frequencies": ("qwen3", faster),
    "no rotation": ("glm", in_layer(1, lambda layer: replace(layer, rotation=None))),
    "the rotation of another layer": ("gemma3", in_layer(0, lambda layer: replace(layer, rotation=1))),
    "the cap of scores": ("gemma2", in_layer(0, lambda layer: replace(layer, cap=0.0))),
    "no window": ("mistral", in_layer(1, lambda layer: replace(layer, windowed=False))),
    "a longer window": ("mistral", lambda parts: replace(parts, window=(parts.window or 0) + 1)),
    "parallel branches": ("gpt_neox", in_layer(0, lambda layer: replace(layer, parallel=False))),
    "norms of rows": ("olmo2", in_layer(0, lambda layer: replace(layer, row_norms=None))),
    "the scale of embeddings": ("gemma", lambda parts: replace(parts, embedding_scale=1.0)),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_part_that_is_not_the_models_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, fault = FAULTS[what]
    model, traits = probed(name)
    parts_of(model, traits)
    found = _Finder.parts
    monkeypatch.setattr(_Finder, "parts", lambda self: fault(found(self)))
    with pytest.raises(UnsupportedParts, match="by native operators differ from the unmodified model's"):
        parts_of(model, traits)


def enlarge_keys(parts: DecoderParts) -> None:
    """Multiply a channel of each key of a model by 64, and divide that of the queries by it."""
    size, shared = parts.head_dim, parts.heads // parts.kv_heads
    for layer in parts.layers:
        rows = [
            (linear.module, row if linear.order is None else int(linear.order[row]))
            for linear in layer.qkv
            for row in range(linear.outputs)
        ]
        for head in range(parts.kv_heads):
            chosen = [((head * shared + each) * size + 1, 1 / 64) for each in range(shared)]
            for output, factor in (*chosen, ((parts.heads + head) * size + 1, 64)):
                module, row = rows[output]
                with torch.no_grad():
                    module.weight[row] *= factor
                    if module.bias is not None:
                        module.bias[row] *= factor


@pytest.mark.parametrize("name", ["qwen2", "glm", "gpt_neox", "phi3", "smollm3"])
def test_queries_and_keys_are_balanced_by_factors_of_at_least_one(name: str) -> None:
    model = built(name)
    enlarge_keys(found_parts(model))
    parts = found_parts(model)
    shared, size = parts.heads // parts.kv_heads, parts.head_dim
    queries, keys = parts.heads * size, parts.kv_heads * size
    for layer in parts.layers:
        factors = torch.cat([linear.factor for linear in layer.qkv if linear.factor is not None])
        q, k, v = factors.split([queries, keys, keys])  # type: ignore[no-untyped-call]
        products = q.view(parts.kv_heads, shared, size) * k.view(parts.kv_heads, 1, size)
        assert (products * layer.scale == size**-0.5).all()
        assert (v == 1).all()
        assert (factors.log2() == factors.log2().round()).all()
        assert factors.min() == 1
        heads = k.view(-1, size)
        assert (heads[:, 1] < heads[:, 7]).all()
        if layer.rotation is not None:
            turned = heads[:, : 2 * len(parts.rotations[layer.rotation].frequencies)]
            first, second = (turned[:, 0::2], turned[:, 1::2]) if parts.interleaved else turned.chunk(2, 1)
            assert (first == second).all()
    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, logits = model(input_ids=ids, use_cache=False).logits, parts.logits(ids, 0)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_norms_of_heads_are_balanced_instead_of_their_matrices() -> None:
    model, traits = probed("qwen3")
    attention = model.model.layers[0].self_attn
    parts = parts_of(model, traits)
    layer = parts.layers[0]
    assert layer.head_norms is not None
    assert [linear.factor for linear in layer.qkv] == [None] * 3
    q, k = (norm.gain for norm in layer.head_norms)
    torch.testing.assert_close(q * k, (attention.q_norm.weight * attention.k_norm.weight).detach(), rtol=0, atol=0)
