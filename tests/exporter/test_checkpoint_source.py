"""Checkpoint source: tokenizers of all kinds are read as fast ones, and the reasons of libraries in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers

from spaceport.exporter.checkpoint_source import model_config, read_source, reason_of, template_of
from spaceport.exporter.sar_config import CheckpointError
from support.copied_checkpoint import copy_of_tiny


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c", tokenizer=None, tokenizer_config=None)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a text with words such as scan and decode" for i in range(300)), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=120, model_type="bpe", byte_fallback=False,
        bos_id=0, eos_id=1, unk_id=2, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}), "utf-8")
    tokenizer = read_source(folder, remote_code=False).tokenizer.backend_tokenizer
    slow = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    sample = "decode a line of text"
    assert tokenizer.encode(sample, add_special_tokens=False).ids == slow.encode(sample)
    assert tokenizer.decode(slow.encode(sample)) == sample


def test_a_word_level_tokenizer_is_read(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}), "utf-8")
    assert read_source(folder, remote_code=False).tokenizer.backend_tokenizer.encode("a b c").ids == [0, 1, 2]


@pytest.mark.parametrize("kind", ["t5", "vit", None])
def test_a_model_that_generates_no_text_by_itself_is_refused(kind: str | None, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c", config={"model_type": kind})
    with pytest.raises(CheckpointError, match=r"config\.json: .*expected one such as llama, qwen3 or mistral"):
        model_config(folder)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such field.\nmore"), "no such field"),
        (ValueError("two of them:\n  the first one"), "two of them: the first one"),
        (KeyError("name"), "KeyError: 'name'"),
        (OSError(), "OSError"),
    ],
)
def test_the_reason_of_an_error_is_one_line(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    tokenizer = read_source(copy_of_tiny(tmp_path / "c"), remote_code=False).tokenizer
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    assert template_of(tokenizer) == "a"
    tokenizer.chat_template = {"tool_use": "b"}
    assert template_of(tokenizer) is None
