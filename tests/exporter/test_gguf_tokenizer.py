"""GGUF tokenizer: token ids equal those of the original tokenizer, and the file's metadata is verified."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

pytest.importorskip("gguf")

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.gguf_file import read_gguf
from spaceport.exporter.gguf_tokenizer import _verify, end_tokens, gguf_tokenizer
from spaceport.exporter.sar_config import CheckpointError
from support.gguf_files import random_model, tokenizer_metadata, write_gguf
from support.paths import TINY

TEXTS = (
    "Hello 1234 and 56",
    "a   1",
    "x = 22  # 3\n\n\tdef f(x):\n    return x's\n",
    "  leading and trailing  ",
    "Grüße, 中文 and 🎉!",
    "user\n<|start|>assistant<|end|>",
    "",
)


def metadata(tmp_path: Path, **changes: Any) -> Any:
    named = {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_gguf(write_gguf(tmp_path / "model.gguf", random_model(), changes=named))


def test_tokenization_equals_the_original_tokenizer(tmp_path: Path) -> None:
    original = AutoTokenizer.from_pretrained(TINY)
    tokenizer = gguf_tokenizer(metadata(tmp_path))
    for text in TEXTS:
        assert tokenizer(text).input_ids == original(text).input_ids, text
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == original.apply_chat_template(turns, tokenize=False)
    assert tokenizer.special_tokens_map == original.special_tokens_map


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*before: Any, own: bool) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)])


def split(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated")


@pytest.mark.parametrize(
    ("pre", "splits", "words_first"),
    [
        ("gpt-2", byte_level(own=True), False),
        ("smollm", byte_level(pre_tokenizers.Digits(individual_digits=True), own=True), False),
        ("qwen2", byte_level(split(r"\p{N}"), own=False), False),
        ("llama-bpe", byte_level(split(r"\p{N}{1,3}"), own=False), True),
    ],
)
def test_the_pre_tokenizer_is_the_one_that_the_file_names(
    pre: str, splits: Any, words_first: bool, tmp_path: Path
) -> None:
    expected = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    expected.pre_tokenizer = splits
    expected.model.ignore_merges = words_first
    tokenizer = gguf_tokenizer(metadata(tmp_path, ggml__pre=pre))
    for text in TEXTS:
        assert tokenizer(text).input_ids == expected.encode(text).ids, text


def test_bos_and_end_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    for adds, pre, bos in ((True, "gpt-2", [0]), (False, "gpt-2", []), (None, "llama-bpe", [0])):
        tokenizer = gguf_tokenizer(metadata(tmp_path, ggml__add_bos_token=adds, ggml__pre=pre))
        assert tokenizer("a").input_ids[:-1] == bos
    file = metadata(tmp_path, ggml__eot_token_id=3, ggml__eom_token_id=1)
    assert end_tokens(file) == [1, 3]
    assert open_checkpoint(file.path, TokenFlags()).tokens.end == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": "llama"}, "tokenizer 'llama' is not supported in GGUF files: expected 'gpt2'"),
        ({"ggml__pre": ["a"]}, "pre-tokenizer ['a'] is not supported: expected one of llama3, "),
        ({"ggml__pre": "strange"}, "pre-tokenizer 'strange' is not supported: expected one of llama3, "),
        ({"ggml__add_eos_token": True}, "add_eos_token is true: expected false"),
        ({"ggml__tokens": None}, "tokenizer.ggml.tokens is None: expected a list of texts; convert the model again"),
        ({"ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens is [1, 2]: expected a list of texts"),
        ({"ggml__tokens": ["a"] * 628}, "tokenizer.ggml.tokens has 'a' twice: expected different texts"),
        ({"ggml__token_type": None}, "tokenizer.ggml.token_type is None: expected a list of numbers"),
        ({"ggml__token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries: expected one for each of 628 tokens"),
        ({"ggml__token_type": ["a"] * 628}, "tokenizer.ggml.token_type is ['a', 'a', "),
        ({"ggml__merges": None}, "tokenizer.ggml.merges is None: expected a list of texts"),
        ({"ggml__merges": ["a"]}, "merges has 'a' as entry 0: expected two tokens that make a third one"),
        ({"ggml__merges": ["i n", "\u4e2d b"]}, "merges has '\u4e2d b' as entry 1: expected two tokens"),
        ({"ggml__eos_token_id": 628}, "tokenizer.ggml.eos_token_id is 628: expected the id of one of 628 tokens"),
        ({"ggml__eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295: expected the id of one of 628 tokens"),
        ({"ggml__bos_token_id": "0"}, "bos_token_id is '0': expected the id of one of 628 tokens"),
        ({"ggml__bos_token_id": None}, "bos_token_id is missing: expected the id of the token that begins a prompt"),
        ({"ggml__add_bos_token": 1}, "add_bos_token is 1: expected true or false"),
        ({"ggml__add_eos_token": "no"}, "add_eos_token is true: expected false"),
        ({"chat_template": 3}, "tokenizer.chat_template is 3: expected text"),
    ],
)
def test_an_unsupported_tokenizer_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        gguf_tokenizer(metadata(tmp_path, **changes))


def test_a_tokenizer_that_differs_from_the_metadata_is_refused(tmp_path: Path) -> None:
    file = metadata(tmp_path)
    tokenizer = gguf_tokenizer(file)
    _verify(file, tokenizer)
    tokenizer.chat_template = "other"
    with pytest.raises(CheckpointError, match=r"tokenizer.chat_template is 'other' after loading: expected "):
        _verify(file, tokenizer)
    tokenizer.chat_template = tokenizer_metadata()["tokenizer.chat_template"]
    tokenizer.add_tokens(["another"])
    with pytest.raises(CheckpointError, match=r"number of tokens is \d+ after loading: expected \d+"):
        _verify(file, tokenizer)
