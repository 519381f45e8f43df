"""ChatGLM3: configurations that cannot be converted exactly are refused before weights are read."""

from __future__ import annotations

from typing import Any

import pytest

from support.converted_configurations import assert_refused
from support.published_checkpoints import WITHOUT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"multi_query_attention": False},
            "multi_query_attention is False, so the model has one key and value head per",
        ),
        ({"multi_query_attention": WITHOUT}, "multi_query_attention is False, so the model has"),
        ({"rmsnorm": False}, "rmsnorm is False, so the model has layer norms with biases: expected True in a ChatGLM3"),
        (
            {"post_layer_norm": False},
            "post_layer_norm is False, so the model has no norm before its head: expected True",
        ),
        ({"add_bias_linear": True}, "add_bias_linear is True, so the model has biases in all linear layers"),
        ({"apply_residual_connection_post_layernorm": True}, "residual connections from behind its norms"),
        ({"fp32_residual_connection": True}, "residuals of another data type than its weights"),
        ({"original_rope": False}, "original_rope is False, so the model has another rotary embedding"),
        ({"interleaved_qkv": True}, "another order of queries, keys and values"),
        ({"rotary_percent": 1.0}, "rotary_percent is 1.0, so the model has another number of rotated dimensions"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128, so the model has a trained prefix (P-tuning): expected None"),
        ({"prefix_projection": True}, "a trained prefix (P-tuning)"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (
            {"quantization_bit": 4},
            "quantization_bit is 4, so its weights are quantized: expected the published weights",
        ),
        (
            {"position_encoding_2d": True},
            "a configuration of the first ChatGLM-6B (two-dimensional positions): expected",
        ),
        ({"inner_hidden_size": 16384}, "a configuration of the first ChatGLM-6B"),
        ({"multi_query_group_num": 3}, "num_attention_heads is 4: expected a multiple of multi_query_group_num 3"),
        ({"kv_channels": 6}, "kv_channels is 6: expected a multiple of 4, because half of them rotate in pairs"),
        ({"num_layers": 0}, "num_layers is 0: expected a whole number of at least 1 in a ChatGLM3 configuration; copy"),
        ({"num_layers": WITHOUT}, "num_layers is missing: expected a whole number"),
        ({"layernorm_epsilon": "1e-5"}, "layernorm_epsilon is '1e-5': expected a number above 0"),
        ({"rope_ratio": 0}, "rope_ratio is 0: expected a number above 0"),
        ({"add_qkv_bias": 1}, "add_qkv_bias is 1: expected true or false"),
        (
            {"window": 7},
            "unknown field 'window' (7): expected the fields of the published ChatGLM3 configuration; remove",
        ),
    ],
)
def test_a_chatglm_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    assert_refused("chatglm", changes, message)
