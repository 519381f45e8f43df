"""ChatGLM: the configuration and tensors of ChatGLM3 checkpoints as those of transformers' `glm`."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoConfig, PreTrainedConfig

from spaceport.exporter.converted_fields import Fields, Fixed
from spaceport.exporter.converted_layout import Source, matrix, vector

_FIXED = {
    "multi_query_attention": Fixed(True, False, "one key and value head per query head, interleaved with the queries"),
    "rmsnorm": Fixed(True, True, "layer norms with biases"),
    "post_layer_norm": Fixed(True, True, "no norm before its head"),
    "add_bias_linear": Fixed(False, False, "biases in all linear layers"),
    "apply_residual_connection_post_layernorm": Fixed(False, False, "residual connections from behind its norms"),
    "fp32_residual_connection": Fixed(False, False, "residuals of another data type than its weights"),
    "original_rope": Fixed(True, True, "another rotary embedding"),
    "interleaved_qkv": Fixed(False, False, "another order of queries, keys and values"),
    "rotary_percent": Fixed(0.5, 0.5, "another number of rotated dimensions"),
    "pre_seq_len": Fixed(None, None, "a trained prefix (P-tuning)"),
    "prefix_projection": Fixed(False, False, "a trained prefix (P-tuning)"),
    "tie_word_embeddings": Fixed(False, False, "a flag that the original code ignores"),
}
_READ = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads", "multi_query_group_num"),
    *(
        "padded_vocab_size",
        "seq_length",
        "layernorm_epsilon",
        "rope_ratio",
        "add_qkv_bias",
        "eos_token_id",
        "pad_token_id",
    ),
)
# Training, or the order of operations: attention scores are divided by the layer's number and multiplied by it again.
_WITHOUT_EFFECT = (
    *("attention_dropout", "hidden_dropout", "classifier_dropout", "bias_dropout_fusion", "use_cache"),
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "vocab_size", "quantization_bit"),
)
_ROTARY_BASE = 10000.0  # times rope_ratio


def check_generation(fields: Fields) -> None:
    """Raise for ChatGLM-6B, the first generation, which has the same model_type and another architecture."""
    if "position_encoding_2d" in fields.content or "inner_hidden_size" in fields.content:
        fields.refuse(
            "a configuration of the first ChatGLM-6B (two-dimensional positions)",
            "ChatGLM3, such as chatglm3-6b",
            "use that",
        )


def chatglm_config(fields: Fields) -> PreTrainedConfig:
    """The `glm` configuration of a published ChatGLM3 configuration."""
    check_generation(fields)
    fields.check(_FIXED, _READ, _WITHOUT_EFFECT)
    heads, groups = fields.whole("num_attention_heads"), fields.whole("multi_query_group_num")
    if heads % groups:
        fields.refuse(
            f"num_attention_heads is {heads}",
            f"a multiple of multi_query_group_num {groups}",
            "copy or download it again",
        )
    if fields.whole("kv_channels") % 4:
        fields.refuse(
            f"kv_channels is {fields.whole('kv_channels')}",
            "a multiple of 4, because half of them rotate in pairs",
            "copy or download it again",
        )
    config: PreTrainedConfig = AutoConfig.for_model(
        "glm",
        vocab_size=fields.whole("padded_vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("ffn_hidden_size"),
        num_hidden_layers=fields.whole("num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=fields.whole("kv_channels"),
        rms_norm_eps=fields.number("layernorm_epsilon"),
        max_position_embeddings=fields.whole("seq_length"),
        attention_bias=fields.flag("add_qkv_bias", False),
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _ROTARY_BASE * fields.number("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        eos_token_id=fields.content.get("eos_token_id"),
        pad_token_id=fields.content.get("pad_token_id"),
    )
    return config


def chatglm_layout(config: PreTrainedConfig) -> Iterator[Source]:
    """The tensors of a ChatGLM3 checkpoint, each with the `glm` weights that it holds."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield matrix("transformer.embedding.word_embeddings.weight", hidden, ("model.embed_tokens.weight", vocabulary))
    for layer in range(config.num_hidden_layers):
        old, new = f"transformer.encoder.layers.{layer}", f"model.layers.{layer}"
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        fused = f"{old}.self_attention.query_key_value"
        yield matrix(
            f"{fused}.weight", hidden, *((f"{new}.self_attn.{name}.weight", size) for name, size in rows.items())
        )
        if config.attention_bias:
            yield vector(f"{fused}.bias", *((f"{new}.self_attn.{name}.bias", size) for name, size in rows.items()))
        yield matrix(f"{old}.self_attention.dense.weight", queries, (f"{new}.self_attn.o_proj.weight", hidden))
        # The gate's rows are the first half in both.
        yield matrix(f"{old}.mlp.dense_h_to_4h.weight", hidden, (f"{new}.mlp.gate_up_proj.weight", 2 * inner))
        yield matrix(f"{old}.mlp.dense_4h_to_h.weight", inner, (f"{new}.mlp.down_proj.weight", hidden))
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{old}.{name}.weight", (f"{new}.{name}.weight", hidden))
    yield vector("transformer.encoder.final_layernorm.weight", ("model.norm.weight", hidden))
    yield matrix("transformer.output_layer.weight", hidden, ("lm_head.weight", vocabulary))
