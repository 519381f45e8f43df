"""Nemotron: the configuration and tensors of Nemotron-Labs-Diffusion checkpoints as those of transformers' `ministral3`.

Their causal pass, in which texts are verified, is that of Ministral 3; the modules have other names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from spaceport.exporter.converted_fields import Fields, Fixed
from spaceport.exporter.converted_layout import Source, matrix, vector

_FIXED = {
    "dlm_paradigm": Fixed("bidirectional", "bidirectional", "another attention than the published models"),
    "hidden_act": Fixed("silu", "silu", "another activation"),
    "attention_bias": Fixed(False, False, "biases in its attention layers"),
    "mlp_bias": Fixed(False, False, "biases in its feed-forward layers"),
    "sliding_window": Fixed(None, None, "sliding windows, which its causal pass ignores"),
    "tie_word_embeddings": Fixed(False, False, "no output embedding of its own"),
}
_READ = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"),
)
# Training, and block diffusion, which the causal pass does not have.
_WITHOUT_EFFECT = (
    *("initializer_range", "use_cache", "attn_implementation", "attention_dropout", "block_size", "rope_scaling"),
    *("dlm_loss_weight", "ar_loss_weight", "dp_varying_mask_ratio"),
)
_ROTARY = ("factor", "original_max_position_embeddings", "rope_theta", "llama_4_scaling_beta")
_ROTARY_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def nemotron_config(fields: Fields) -> PreTrainedConfig:
    """The `ministral3` configuration of a published Nemotron-Labs-Diffusion configuration."""
    fields.check(_FIXED, _READ, _WITHOUT_EFFECT)
    positions = fields.whole("max_position_embeddings")
    config: PreTrainedConfig = AutoConfig.for_model(
        "ministral3",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=fields.whole("num_attention_heads"),
        num_key_value_heads=fields.whole("num_key_value_heads"),
        head_dim=fields.whole("head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        rope_parameters=_rotary(fields, positions),
        bos_token_id=fields.content.get("bos_token_id", 1),
        eos_token_id=fields.content.get("eos_token_id", 2),
        pad_token_id=fields.content.get("pad_token_id"),
    )
    return config


def nemotron_layout(config: PreTrainedConfig) -> Iterator[Source]:
    """The tensors of a Nemotron-Labs-Diffusion checkpoint, whose model is called `encoder` and its head `diffusion_head`."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    yield _renamed("embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield _renamed(f"{prefix}.self_attn.{name}.weight", rows, hidden)
        yield _renamed(f"{prefix}.self_attn.o_proj.weight", hidden, queries)
        yield _renamed(f"{prefix}.mlp.gate_proj.weight", inner, hidden)
        yield _renamed(f"{prefix}.mlp.up_proj.weight", inner, hidden)
        yield _renamed(f"{prefix}.mlp.down_proj.weight", hidden, inner)
        yield _renamed(f"{prefix}.input_layernorm.weight", hidden)
        yield _renamed(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield _renamed("norm.weight", hidden)
    yield matrix("diffusion_head.weight", hidden, ("lm_head.weight", config.vocab_size))


def _renamed(name: str, rows: int, columns: int | None = None) -> Source:
    published, own = f"encoder.{name}", (f"model.{name}", rows)
    return vector(published, own) if columns is None else matrix(published, columns, own)


def _rotary(fields: Fields, positions: int) -> dict[str, Any]:
    """The YaRN embedding with the scaling of queries that Llama 4 has; both are those of `ministral3`."""
    content = fields.content.get("rope_parameters")
    expected = f"an object with rope_type yarn, {', '.join(_ROTARY)}"
    known = {"rope_type", "type", *_ROTARY, *_ROTARY_DEFAULTS}
    if not isinstance(content, dict) or not set(content) <= known or content.get("rope_type") != "yarn":
        fields.refuse(f"rope_parameters is {content!r:.80}", expected, "copy or download it again")
    inside = Fields(fields.file, {f"rope_parameters.{name}": value for name, value in content.items()}, fields.title)
    parameters: dict[str, Any] = {name: inside.number(f"rope_parameters.{name}") for name in _ROTARY}
    parameters |= {name: inside.number(f"rope_parameters.{name}", value) for name, value in _ROTARY_DEFAULTS.items()}
    original = inside.whole("rope_parameters.original_max_position_embeddings")
    if parameters["factor"] * original != positions or parameters["factor"] < 1:
        fields.refuse(
            f"rope_parameters.factor is {parameters['factor']:g}, max_position_embeddings is {positions}",
            f"{original} (original_max_position_embeddings) times a factor of at least 1",
            "use a published instruct checkpoint",
        )
    return {"rope_type": "yarn", **parameters, "original_max_position_embeddings": original}
