"""Published tokenizers: those of tiny folders of ChatGLM3, InternLM v1 and Qwen v1, with entries of tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spaceport.exporter.converted_tokenizer import PublishedTokenizer, published_tokenizer
from support.published_checkpoints import rank_lines, ranks, sentencepiece_model


def chatglm(folder: Path, source: str = "<|user|> <|observation|>", **config: Any) -> PublishedTokenizer:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "tokenization_chatglm.py").write_text(source, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published_tokenizer(folder, "chatglm", {})


def internlm(folder: Path, **config: Any) -> PublishedTokenizer:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(dummy_prefix=False, user_defined=("<eoh>", "<eoa>")))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published_tokenizer(folder, "internlm", {})


def qwen(folder: Path, chat_format: str = "chatml", **config: Any) -> PublishedTokenizer:
    (folder / "qwen.tiktoken").write_bytes(rank_lines(ranks()))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published_tokenizer(folder, "qwen", {"chat_format": chat_format})
