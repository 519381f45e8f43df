"""Qwen v1: configurations that cannot be converted exactly are refused before weights are read."""

from __future__ import annotations

from typing import Any

import pytest

from support.converted_configurations import assert_refused, converted
from support.published_checkpoints import WITHOUT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"no_bias": False},
            "no_bias is False, so the model has biases in all linear layers: expected True in a Qwen v1",
        ),
        ({"rotary_pct": 0.5}, "rotary_pct is 0.5, so the model has a rotary embedding of a part of each head"),
        ({"scale_attn_weights": False}, "attention scores that are not scaled"),
        ({"use_cache_quantization": True}, "a quantized KV cache"),
        ({"use_cache_kernel": True}, "a quantized KV cache"),
        ({"visual": {"layers": 48}}, "visual is {'layers': 48}, so the model has an image encoder (Qwen-VL)"),
        ({"audio": {}}, "audio is {}, so the model has an audio encoder (Qwen-Audio)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}, so its"),
        (
            {"n_embd": 4096},
            "fields of Qwen's first release (n_embd, n_layer): expected hidden_size and num_hidden_layers",
        ),
        ({"kv_channels": 16}, "kv_channels is 16 with 4 heads: expected an even number, and hidden_size 32 divided by"),
        ({"intermediate_size": 49}, "intermediate_size is 49: expected an even number: the gate and the other half"),
        ({"rope_theta": 5}, "rope_theta is 5: expected rotary_emb_base, 10000; correct the one that is wrong"),
        ({"seq_length": WITHOUT}, "seq_length is missing: expected a whole number of at least 1 in a Qwen v1"),
        ({"use_dynamic_ntk": "auto"}, "use_dynamic_ntk is 'auto': expected true or false"),
        ({"sliding_window": 7}, "unknown field 'sliding_window' (7)"),
    ],
)
def test_a_qwen_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    assert_refused("qwen", changes, message)


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"seq_length": 64}, 64),
        ({"seq_length": 64, "use_dynamic_ntk": False}, 64),
        ({"seq_length": 64, "use_logn_attn": False}, 64),
        ({"seq_length": 64, "use_logn_attn": False, "use_dynamic_ntk": False}, 512),
        ({"seq_length": 1024}, 512),
    ],
)
def test_qwen_ends_where_its_attention_changes(changes: dict[str, Any], positions: int) -> None:
    assert converted("qwen", changes).max_position_embeddings == positions
