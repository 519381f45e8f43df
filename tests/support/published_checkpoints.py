"""Published checkpoints: tiny random folders with the files, names and layouts of ChatGLM3, InternLM v1 and Qwen v1."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import sentencepiece
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

Format = Literal["safetensors", "bin"]

CORPUS = (
    "the answer of the tower is the ship, and the ship is the answer to philosophy",
    "def f(x):\n    return x + 1  # 2024-11-23\n\n\tif x == 10:\n        print('ok')",
    "你好世界，你们好。世界你好 你好 你好",
    "Grüße aus Köln; naïve café; Ω and é",
    "привет мир, мир и война и мир",
    "مرحبا بالعالم مرحبا",
    "this is it's 'tis -- ---- ======== aaaa aaa abab",
    "😀😁 👍🏽 👨‍👩‍👧",
)

CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 24,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "padded_vocab_size": 512,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 256,
    "use_cache": True,
    "torch_dtype": "float16",
    "transformers_version": "4.30.2",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
INTERNLM: dict[str, Any] = {
    "model_type": "internlm",
    "architectures": ["InternLMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_internlm.InternLMConfig"},
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-06,
    "rotary": {"base": 10000, "type": "dynamic"},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.2",
    "use_cache": True,
    "vocab_size": 512,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen",
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "attn_dropout_prob": 0.0,
    "bf16": True,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "kv_channels": 8,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 512,
    "no_bias": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 256,
    "tie_word_embeddings": False,
    "tokenizer_class": "QWenTokenizer",
    "transformers_version": "4.32.0",
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": 640,
}
CONFIGS = {"chatglm": CHATGLM, "internlm": INTERNLM, "qwen": QWEN}


WITHOUT: Any = object()  # of a field that a configuration lacks


def configuration(family: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a tiny checkpoint with other fields, or without some."""
    content = {**CONFIGS[family], **changes}
    return {name: value for name, value in content.items() if value is not WITHOUT}


@dataclass(frozen=True)
class Published:
    """A published checkpoint: what its files hold."""

    family: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor] = field(repr=False)  # float32, by published name


def published(family: str, changes: Mapping[str, Any] | None = None) -> Published:
    """A seeded random model of a family, with weights so large that every token changes the logits."""
    config = {**CONFIGS[family], **(changes or {})}
    dice = torch.Generator().manual_seed(11)
    weights = {}
    for name, shape in _SHAPES[family](config).items():
        noise = torch.randn(shape, generator=dice)
        weights[name] = 1 + 0.2 * noise if "norm" in name or ".ln_" in name else 0.2 * noise
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    return Published(family, config, weights)


def _chatglm_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    wide = size * config["num_attention_heads"]
    fused = wide + 2 * size * config["multi_query_group_num"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (config["padded_vocab_size"], hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (config["padded_vocab_size"], hidden),
    }
    for layer in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.mlp.dense_4h_to_h.weight": (hidden, inner),
            f"{name}.mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attention.dense.weight": (hidden, wide),
            f"{name}.self_attention.query_key_value.weight": (fused, hidden),
        }
        if config["add_qkv_bias"]:
            shapes[f"{name}.self_attention.query_key_value.bias"] = (fused,)
    return shapes


def _internlm_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, hidden),
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        for part in "qkvo":
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (hidden, hidden)
            if config["bias"]:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (hidden,)
    return shapes


def _qwen_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"] // 2, config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.wte.weight": (vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"transformer.h.{layer}"
        shapes |= {
            f"{name}.attn.c_attn.bias": (3 * hidden,),
            f"{name}.attn.c_attn.weight": (3 * hidden, hidden),
            f"{name}.attn.c_proj.weight": (hidden, hidden),
            f"{name}.ln_1.weight": (hidden,),
            f"{name}.ln_2.weight": (hidden,),
            f"{name}.mlp.c_proj.weight": (hidden, inner),
            f"{name}.mlp.w1.weight": (inner, hidden),
            f"{name}.mlp.w2.weight": (inner, hidden),
        }
    return shapes


_SHAPES = {"chatglm": _chatglm_shapes, "internlm": _internlm_shapes, "qwen": _qwen_shapes}


@cache
def sentencepiece_model(
    dummy_prefix: bool = True,
    normalizer: str = "identity",
    extra_whitespace: bool = False,
    user_defined: tuple[str, ...] = (),
    pieces: int = 480,
    kind: str = "bpe",
    bytes_too: bool = True,
) -> bytes:
    """A SentencePiece model that is trained on the corpus."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n")),
        model_writer=model,
        vocab_size=pieces,
        model_type=kind,
        character_coverage=0.98,
        byte_fallback=bytes_too,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name=normalizer,
        remove_extra_whitespaces=extra_whitespace,
        user_defined_symbols=list(user_defined),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@cache
def ranks(tokens: int = 420) -> dict[bytes, int]:
    """The ranks of a byte-pair encoding that is trained on the corpus: bytes first, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    numbers = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return {bytes(numbers[letter] for letter in token): rank for token, rank in tokenizer.get_vocab().items()}


def rank_lines(found: Mapping[bytes, int]) -> bytes:
    """A file of ranks, as tiktoken reads it."""
    ordered = sorted(found.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def write_published(folder: Path, model: Published, format: Format = "safetensors", shards: int = 1) -> Path:
    """Write the folder of a published checkpoint: configuration, weights, tokenizer and its Python files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(model.config)), "utf-8")
    write_weights(folder, model.weights, format, shards)
    if model.family == "qwen":
        (folder / "qwen.tiktoken").write_bytes(rank_lines(ranks()))
        settings = {"chat_format": "chatml", "eos_token_id": len(ranks()), "max_new_tokens": 512, "top_p": 0.8}
        (folder / "generation_config.json").write_text(json.dumps(settings), "utf-8")
        return folder
    plain = model.family == "chatglm"
    user_defined = () if plain else ("<eoh>", "<eoa>", "<TOKENS_UNUSED_2>")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(dummy_prefix=plain, user_defined=user_defined))
    if plain:
        (folder / "tokenization_chatglm.py").write_text("raise SystemExit('<|user|> <|observation|>')\n", "utf-8")
    return folder


def write_weights(folder: Path, weights: Mapping[str, Tensor], format: Format, shards: int = 1) -> None:
    """Write the weights into one file, or into several with an index."""
    stem, index = (
        ("model", "model.safetensors.index.json")
        if format == "safetensors"
        else (
            "pytorch_model",
            "pytorch_model.bin.index.json",
        )
    )
    names = sorted(weights)
    files = {}
    for shard in range(shards):
        part = {name: weights[name].clone() for name in names[shard::shards]}
        file = f"{stem}.{format}" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}.{format}"
        if format == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
        files |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")
