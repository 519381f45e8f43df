"""Published checkpoints: tiny random folders with the files, names and layouts of ChatGLM3, InternLM v1 and Qwen v1.

Their logits are computed from the papers, in float64 and by the published names, without transformers. RMSNorm: Zhang and
Sennrich 2019. Rotary embeddings: Su et al. 2021. Multi-query groups: Ainslie et al. 2023. SwiGLU: Shazeer 2020. Dynamic NTK
and log n scaling are not here: they begin behind the lengths that a converted model has.
"""

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
from torch.nn import functional
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spaceport.exporter.converted_checkpoint import published_tensors
from spaceport.exporter.converted_families import FAMILIES, Fields

Format = Literal["safetensors", "bin"]
Weights = Mapping[str, Tensor]  # by published name

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

FOLDER = Path(__file__).parents[1] / "data" / "published"
CONFIGS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.iterdir())
}


WITHOUT: Any = object()  # of a field that a configuration lacks


def fields_of(family: str, changes: Mapping[str, Any]) -> Fields:
    """The configuration of a tiny checkpoint with other fields, or without some."""
    content = {name: value for name, value in {**CONFIGS[family], **changes}.items() if value is not WITHOUT}
    return Fields(Path("config.json"), content, FAMILIES[family].title)


def converted(family: str, changes: Mapping[str, Any]) -> Any:
    """The configuration of the converted model."""
    return FAMILIES[family].config(fields_of(family, changes))


@dataclass(frozen=True)
class Published:
    """A published checkpoint: what its files hold."""

    family: str
    config: Mapping[str, Any]
    weights: Weights = field(repr=False)  # float32


def published(family: str, changes: Mapping[str, Any] | None = None) -> Published:
    """A seeded random model of a family, with weights so large that every token changes the logits."""
    dice = torch.Generator().manual_seed(11)
    weights = {}
    for tensor in published_tensors(FAMILIES[family], converted(family, changes or {})):
        if tensor.copy_of is None:
            noise = torch.randn(tensor.shape, generator=dice)
            weights[tensor.name] = 1 + 0.2 * noise if "norm" in tensor.name or ".ln_" in tensor.name else 0.2 * noise
    return Published(family, {**CONFIGS[family], **(changes or {})}, weights)


@cache
def sentencepiece_model(**options: Any) -> bytes:
    """A SentencePiece model that is trained on the corpus, with options of its trainer."""
    model = io.BytesIO()
    defaults = {"vocab_size": 480, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n")),
        model_writer=model,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"remove_extra_whitespaces": False, **defaults, **options},
    )
    return model.getvalue()


@cache
def ranks() -> dict[bytes, int]:
    """The ranks of a byte-pair encoding that is trained on the corpus: bytes first, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
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
    own = "" if plain else "<eoh>,<eoa>,<TOKENS_UNUSED_2>"
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(add_dummy_prefix=plain, user_defined_symbols=own))
    if plain:
        (folder / "tokenization_chatglm.py").write_text("raise SystemExit('<|user|> <|observation|>')\n", "utf-8")
    return folder


def write_weights(folder: Path, weights: Weights, format: Format, shards: int) -> None:
    """Write the weights into one file, or into several with an index."""
    stem = "model" if format == "safetensors" else "pytorch_model"
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
        (folder / f"{stem}.{format}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, epsilon)


def _rotated(x: Tensor, base: float, neighbours: bool = False) -> Tensor:
    """Heads (tokens x heads x size) rotated by their positions: dimensions 2i and 2i + 1 of the first half, or i and i + d / 2."""
    kept = x.shape[-1] // 2 if neighbours else x.shape[-1]
    pairs = x[..., :kept].unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = base ** (-2 * torch.arange(kept // 2, dtype=torch.float64) / kept)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
    return torch.cat([(turned if neighbours else turned.transpose(-1, -2)).flatten(-2), x[..., kept:]], -1)


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention: each group of query heads has one key head."""
    q, k, v = (heads.transpose(0, 1)[None] for heads in (queries, keys, values))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return found[0].transpose(0, 1).flatten(1)


def _linear(weights: Weights, name: str, x: Tensor, bias: bool = False) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"] if bias else None)


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
        q, k = (_rotated(part.unflatten(-1, (-1, size)), base, neighbours=True) for part in (q, k))
        x = x + _linear(weights, f"{name}.self_attention.dense", _attended(q, k, v.unflatten(-1, (-1, size))))
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], epsilon)
        gate, up = _linear(weights, f"{name}.mlp.dense_h_to_4h", normed).chunk(2, -1)
        x = x + _linear(weights, f"{name}.mlp.dense_4h_to_h", functional.silu(gate) * up)
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
        attended = _attended(_rotated(q, base), _rotated(k, base), v)
        x = x + _linear(weights, f"{name}.self_attn.o_proj", attended, config["bias"])
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], epsilon)
        gate, up = (_linear(weights, f"{name}.mlp.{part}_proj", normed) for part in ("gate", "up"))
        x = x + _linear(weights, f"{name}.mlp.down_proj", functional.silu(gate) * up)
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
        x = x + _linear(weights, f"{name}.attn.c_proj", _attended(_rotated(q, base), _rotated(k, base), v))
        normed = _norm(x, weights[f"{name}.ln_2.weight"], epsilon)
        one, two = _linear(weights, f"{name}.mlp.w1", normed), _linear(weights, f"{name}.mlp.w2", normed)
        x = x + _linear(weights, f"{name}.mlp.c_proj", one * functional.silu(two))
    x = _norm(x, weights["transformer.ln_f.weight"], epsilon)
    return x @ weights["transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
