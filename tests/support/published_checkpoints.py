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

from spaceport.exporter.converted_checkpoint import published_tensors
from spaceport.exporter.converted_families import FAMILIES, Fields

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
    weights: Mapping[str, Tensor] = field(repr=False)  # float32, by published name


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


def write_weights(folder: Path, weights: Mapping[str, Tensor], format: Format, shards: int) -> None:
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
