"""InternLM: the configuration and tensors of InternLM v1 checkpoints as those of transformers' `llama`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from spaceport.exporter.converted_fields import Fields, Fixed
from spaceport.exporter.converted_layout import Source, matrix, tied, vector

_FIXED = {
    "hidden_act": Fixed("silu", "silu", "another activation"),
    "rope_scaling": Fixed(None, None, "a rotary scaling that the original code ignores"),
}
_READ = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "bias"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rotary", "rope_theta", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_WITHOUT_EFFECT = ("initializer_range", "use_cache", "pretraining_tp", "attn_implementation")
_ROTARY = {"base": 10000, "type": "dynamic"}  # where the configuration has none; equal up to max_position_embeddings


def internlm_config(fields: Fields) -> PreTrainedConfig:
    """The `llama` configuration of a published InternLM v1 configuration."""
    fields.check(_FIXED, _READ, _WITHOUT_EFFECT)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    if fields.whole("num_key_value_heads", heads) != heads:
        fields.refuse(
            f"num_key_value_heads is {fields.content['num_key_value_heads']}",
            f"{heads}, the number of query heads, in an InternLM v1 checkpoint",
            "use internlm2 or later with grouped heads",
        )
    if hidden % (2 * heads):
        fields.refuse(
            f"hidden_size is {hidden}", f"{heads} heads of an even number of dimensions", "copy or download it again"
        )
    biased = fields.flag("bias", True)
    config: PreTrainedConfig = AutoConfig.for_model(
        "llama",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        attention_bias=biased,
        mlp_bias=False,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        rope_parameters=_rotary(fields),
        bos_token_id=fields.content.get("bos_token_id", 1),
        eos_token_id=fields.content.get("eos_token_id", 2),
        pad_token_id=fields.content.get("pad_token_id", 0),
    )
    return config


def internlm_layout(config: PreTrainedConfig) -> Iterator[Source]:
    """The tensors of an InternLM v1 checkpoint: all have the names that `llama` gives them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield _same("model.embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield _same(f"{prefix}.self_attn.{name}.weight", hidden, hidden)
            if config.attention_bias:
                yield _same(f"{prefix}.self_attn.{name}.bias", hidden)
        yield _same(f"{prefix}.mlp.gate_proj.weight", inner, hidden)
        yield _same(f"{prefix}.mlp.up_proj.weight", inner, hidden)
        yield _same(f"{prefix}.mlp.down_proj.weight", hidden, inner)
        yield _same(f"{prefix}.input_layernorm.weight", hidden)
        yield _same(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield _same("model.norm.weight", hidden)
    head = _same("lm_head.weight", config.vocab_size, hidden)
    yield tied(head, "model.embed_tokens.weight") if config.tie_word_embeddings else head


def _same(name: str, rows: int, columns: int | None = None) -> Source:
    return vector(name, (name, rows)) if columns is None else matrix(name, columns, (name, rows))


def _rotary(fields: Fields) -> dict[str, Any]:
    """The rotary embedding: `dynamic` has the same frequencies as `origin` up to max_position_embeddings."""
    base = fields.number("rope_theta", 10000.0)
    rotary = fields.content.get("rotary") or {**_ROTARY, "base": base}
    expected = "an object with base, type (origin or dynamic) and optionally scaling_factor"
    known = isinstance(rotary, dict) and set(rotary) <= {"base", "type", "scaling_factor"}
    if not known or rotary.get("type") not in ("origin", "dynamic"):
        fields.refuse(f"rotary is {rotary!r:.80}", expected, "use an InternLM v1 checkpoint with one of these")
    inside = Fields(fields.file, {f"rotary.{name}": value for name, value in rotary.items()}, fields.title)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": inside.number("rotary.base")}
    if rotary["type"] == "dynamic":
        parameters |= {"rope_type": "dynamic", "factor": inside.number("rotary.scaling_factor", 1.0)}
    return parameters
