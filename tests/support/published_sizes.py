"""Published sizes: config.json of full-size checkpoints that transformers ships, with their numbers of parameters.

The sizes are those of the papers: Llama 2 (Touvron et al., 2023, with the published config.json) and Falcon (Almazrouei
et al., 2023). Vicuna 7B v1.5 and 13B v1.5 have the sizes of Llama 2.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_LLAMA,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


FALCON_40B: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 65024,
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
# Name -> configuration, parameters, layers x KV heads x head size.
SIZES: dict[str, tuple[dict[str, Any], int, tuple[int, int, int]]] = {
    "llama-2-7b": (_llama(4096, 11008, 32, 32, 32), 6_738_415_616, (32, 32, 128)),
    "llama-2-13b": (_llama(5120, 13824, 40, 40, 40), 13_015_864_320, (40, 40, 128)),
    "llama-2-70b": (_llama(8192, 28672, 80, 64, 8), 68_976_648_192, (80, 8, 128)),
    "falcon-40b": (FALCON_40B, 41_303_293_952, (60, 8, 64)),
}
CHATGLM3 = {
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "num_layers": 28,
    "multi_query_group_num": 2,
    "padded_vocab_size": 65024,
}
QWEN_14B = {
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "kv_channels": 128,
    "vocab_size": 152064,
    "seq_length": 2048,
    "max_position_embeddings": 8192,
}
# Name -> published family, what its configuration has besides flags, parameters.
CONVERTED: dict[str, tuple[str, dict[str, Any], int]] = {
    "chatglm3-6b": ("chatglm", {**CHATGLM3, "seq_length": 8192}, 6_243_584_000),
    "qwen-14b": ("qwen", QWEN_14B, 14_167_290_880),
}
