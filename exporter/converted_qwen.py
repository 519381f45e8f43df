"""Qwen: the configuration and tensors of Qwen v1 checkpoints as those of transformers' `qwen2`."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoConfig, PreTrainedConfig

from spaceport.exporter.converted_fields import Fields, Fixed
from spaceport.exporter.converted_layout import Source, matrix, tied, vector

_FIXED = {
    "no_bias": Fixed(True, True, "biases in all linear layers"),
    "rotary_pct": Fixed(1.0, 1.0, "a rotary embedding of a part of each head"),
    "scale_attn_weights": Fixed(True, True, "attention scores that are not scaled"),
    "use_cache_quantization": Fixed(False, False, "a quantized KV cache"),
    "use_cache_kernel": Fixed(False, False, "a quantized KV cache"),
    "visual": Fixed(None, None, "an image encoder (Qwen-VL)"),
    "audio": Fixed(None, None, "an audio encoder (Qwen-Audio)"),
}
_READ = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "kv_channels", "vocab_size"),
    *("seq_length", "max_position_embeddings", "use_dynamic_ntk", "use_logn_attn", "layer_norm_epsilon"),
    *("rotary_emb_base", "tie_word_embeddings", "bf16", "fp16", "fp32", "params_dtype", "rope_theta"),
)
_WITHOUT_EFFECT = (
    *("attn_dropout_prob", "emb_dropout_prob", "initializer_range", "onnx_safe", "use_cache", "use_flash_attn"),
    *("softmax_in_fp32", "padded_vocab_size", "tokenizer_type"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),  # the original code ends at tokens of its tokenizer
)
_OLD_NAMES = ("n_embd", "n_layer", "ffn_hidden_size")  # of the release of August 2023


def _check(fields: Fields) -> None:
    """Refuse configurations that `qwen2` cannot compute."""
    if any(name in fields.content for name in _OLD_NAMES):
        fields.refuse(
            "fields of Qwen's first release (n_embd, n_layer)", "hidden_size and num_hidden_layers", "download it again"
        )
    fields.check(_FIXED, _READ, _WITHOUT_EFFECT)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    channels = fields.whole("kv_channels", 128)
    if heads * channels != hidden or channels % 2:
        fields.refuse(
            f"kv_channels is {channels} with {heads} heads",
            f"an even number, and hidden_size {hidden} divided by the heads",
            "copy or download it again",
        )
    base = fields.number("rotary_emb_base", 10000)
    if fields.number("rope_theta", base) != base:
        fields.refuse(
            f"rope_theta is {fields.content['rope_theta']}",
            f"rotary_emb_base, {base:g}",
            "correct the one that is wrong",
        )
    inner = fields.whole("intermediate_size")
    if inner % 2:
        fields.refuse(
            f"intermediate_size is {inner}", "an even number: the gate and the other half", "copy or download it again"
        )


def qwen_config(fields: Fields) -> PreTrainedConfig:
    """The `qwen2` configuration of a published Qwen v1 configuration.

    Longer texts than seq_length change the rotary frequencies (dynamic NTK) and scale the queries (log n),
    so the converted model ends there.
    """
    _check(fields)
    heads = fields.whole("num_attention_heads")
    config: PreTrainedConfig = AutoConfig.for_model(
        "qwen2",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size") // 2,  # the gate and the other half
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        max_position_embeddings=_positions(fields),
        use_sliding_window=False,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        rope_parameters={"rope_type": "default", "rope_theta": fields.number("rotary_emb_base", 10000)},
    )
    return config


def qwen_layout(config: PreTrainedConfig) -> Iterator[Source]:
    """The tensors of a Qwen v1 checkpoint, each with the `qwen2` weights that it holds."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    yield matrix("transformer.wte.weight", hidden, ("model.embed_tokens.weight", vocabulary))
    for layer in range(config.num_hidden_layers):
        old, new = f"transformer.h.{layer}", f"model.layers.{layer}"
        projections = [f"{new}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        yield matrix(f"{old}.attn.c_attn.weight", hidden, *((f"{name}.weight", hidden) for name in projections))
        yield vector(f"{old}.attn.c_attn.bias", *((f"{name}.bias", hidden) for name in projections))
        yield matrix(f"{old}.attn.c_proj.weight", hidden, (f"{new}.self_attn.o_proj.weight", hidden))
        # The original multiplies w1(x) by silu(w2(x)).
        yield matrix(f"{old}.mlp.w1.weight", hidden, (f"{new}.mlp.up_proj.weight", inner))
        yield matrix(f"{old}.mlp.w2.weight", hidden, (f"{new}.mlp.gate_proj.weight", inner))
        yield matrix(f"{old}.mlp.c_proj.weight", inner, (f"{new}.mlp.down_proj.weight", hidden))
        yield vector(f"{old}.ln_1.weight", (f"{new}.input_layernorm.weight", hidden))
        yield vector(f"{old}.ln_2.weight", (f"{new}.post_attention_layernorm.weight", hidden))
    yield vector("transformer.ln_f.weight", ("model.norm.weight", hidden))
    head = matrix("lm_head.weight", hidden, ("lm_head.weight", vocabulary))
    yield tied(head, "transformer.wte.weight") if config.tie_word_embeddings else head


def _positions(fields: Fields) -> int:
    """The positions up to which the model computes as in training."""
    positions = fields.whole("max_position_embeddings", 8192)
    if fields.flag("use_dynamic_ntk", True) or fields.flag("use_logn_attn", True):
        return min(positions, fields.whole("seq_length"))
    return positions
