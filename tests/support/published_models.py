"""Published models: ChatGLM3, InternLM v1 and Qwen v1, written from their papers, in float64 and by their published names.

No part of transformers is used. RMSNorm: Zhang and Sennrich 2019. Rotary embeddings: Su et al. 2021. Multi-query groups:
Ainslie et al. 2023. SwiGLU: Shazeer 2020. Dynamic NTK and log n scaling are not here: they begin behind the lengths that a
converted model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon)


def _turned(pairs: Tensor, base: float) -> Tensor:
    """Complex numbers, tokens x heads x frequencies, turned by their position times their frequency."""
    tokens, _, count = pairs.shape
    frequencies = torch.tensor([base ** (-index / count) for index in range(count)], dtype=torch.float64)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return pairs * torch.polar(torch.ones_like(angles), angles)[:, None]


def _rotate_neighbours(x: Tensor, base: float, rotated: int) -> Tensor:
    """Rotate dimensions 2i and 2i + 1 together, within the first dimensions of each head."""
    pairs = torch.complex(x[..., 0:rotated:2].contiguous(), x[..., 1:rotated:2].contiguous())
    turned = torch.view_as_real(_turned(pairs, base)).flatten(-2)
    return torch.cat([turned, x[..., rotated:]], -1)


def _rotate_halves(x: Tensor, base: float) -> Tensor:
    """Rotate dimensions i and i + d / 2 of each head together."""
    half = x.shape[-1] // 2
    turned = _turned(torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()), base)
    return torch.cat([turned.real, turned.imag], -1)


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention, one query head after the other: each group of query heads has one key head."""
    tokens, heads, size = queries.shape
    found = []
    for head in range(heads):
        group = head * keys.shape[1] // heads
        scores = queries[:, head] @ keys[:, group].T / size**0.5
        later = torch.arange(tokens)[None] > torch.arange(tokens)[:, None]
        found.append(torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ values[:, group])
    return torch.cat(found, -1)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _linear(weights: Weights, name: str, x: Tensor, bias: bool = False) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if bias else y


def chatglm_logits(config: Mapping[str, Any], weights: Weights, ids: list[int]) -> Tensor:
    """The logits of a ChatGLM3 model, tokens x vocabulary."""
    size, heads, groups = config["kv_channels"], config["num_attention_heads"], config["multi_query_group_num"]
    base, epsilon = 10000.0 * config.get("rope_ratio", 1), config["layernorm_epsilon"]
    x = weights["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{layer}"
        normed = _norm(x, weights[f"{name}.input_layernorm.weight"], epsilon)
        fused = _linear(weights, f"{name}.self_attention.query_key_value", normed, config["add_qkv_bias"])
        q, k, v = fused.split([heads * size, groups * size, groups * size], -1)
        q, k = (_rotate_neighbours(part.unflatten(-1, (-1, size)), base, size // 2) for part in (q, k))
        x = x + _linear(weights, f"{name}.self_attention.dense", _attended(q, k, v.unflatten(-1, (-1, size))))
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], epsilon)
        gate, up = _linear(weights, f"{name}.mlp.dense_h_to_4h", normed).chunk(2, -1)
        x = x + _linear(weights, f"{name}.mlp.dense_4h_to_h", _silu(gate) * up)
    x = _norm(x, weights["transformer.encoder.final_layernorm.weight"], epsilon)
    return _linear(weights, "transformer.output_layer", x)


def internlm_logits(config: Mapping[str, Any], weights: Weights, ids: list[int]) -> Tensor:
    """The logits of an InternLM v1 model, tokens x vocabulary."""
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    base = config["rotary"]["base"]
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = _norm(x, weights[f"{name}.input_layernorm.weight"], epsilon)
        q, k, v = (
            _linear(weights, f"{name}.self_attn.{part}_proj", normed, config["bias"]).unflatten(-1, (heads, -1))
            for part in "qkv"
        )
        attended = _attended(_rotate_halves(q, base), _rotate_halves(k, base), v)
        x = x + _linear(weights, f"{name}.self_attn.o_proj", attended, config["bias"])
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], epsilon)
        gate, up = (_linear(weights, f"{name}.mlp.{part}_proj", normed) for part in ("gate", "up"))
        x = x + _linear(weights, f"{name}.mlp.down_proj", _silu(gate) * up)
    x = _norm(x, weights["model.norm.weight"], epsilon)
    return x @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def qwen_logits(config: Mapping[str, Any], weights: Weights, ids: list[int]) -> Tensor:
    """The logits of a Qwen v1 model, tokens x vocabulary."""
    heads, base, epsilon = config["num_attention_heads"], config["rotary_emb_base"], config["layer_norm_epsilon"]
    x = weights["transformer.wte.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"transformer.h.{layer}"
        fused = _linear(weights, f"{name}.attn.c_attn", _norm(x, weights[f"{name}.ln_1.weight"], epsilon), bias=True)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in fused.chunk(3, -1))
        x = x + _linear(weights, f"{name}.attn.c_proj", _attended(_rotate_halves(q, base), _rotate_halves(k, base), v))
        normed = _norm(x, weights[f"{name}.ln_2.weight"], epsilon)
        one, two = _linear(weights, f"{name}.mlp.w1", normed), _linear(weights, f"{name}.mlp.w2", normed)
        x = x + _linear(weights, f"{name}.mlp.c_proj", one * _silu(two))
    x = _norm(x, weights["transformer.ln_f.weight"], epsilon)
    return x @ weights["transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
