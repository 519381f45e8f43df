"""Tiktoken tokenizers: tokens equal those of the algorithm that tiktoken documents, written plainly."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import normalizers

from spaceport.exporter.converted_tokenizer import _QWEN_PATTERN
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.tiktoken_tokenizer import read_ranks, tiktoken_tokenizer
from support.published_checkpoints import rank_lines, ranks
from support.varied_texts import varied_texts

SPECIAL = {text: len(ranks()) + index for index, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}


def merged(part: bytes, found: dict[bytes, int]) -> list[int]:
    """Merge the pair whose result has the lowest rank, the leftmost of several, until no pair makes a token."""
    if part in found:
        return [found[part]]
    tokens = [bytes([byte]) for byte in part]
    while len(tokens) > 1:
        pairs = [
            (found[left + right], index)
            for index, (left, right) in enumerate(pairwise(tokens))
            if left + right in found
        ]
        if not pairs:
            break
        _, index = min(pairs)
        tokens[index : index + 2] = [tokens[index] + tokens[index + 1]]
    return [found[token] for token in tokens]


def plain_tokens(text: str, found: dict[bytes, int], special: dict[str, int]) -> list[int]:
    """The tokens of a text in which special tokens are recognized."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", unicodedata.normalize("NFC", text)):
        if part in special:
            ids.append(special[part])
        else:
            for word in regex.findall(_QWEN_PATTERN, part):
                ids += merged(word.encode(), found)
    return ids


@pytest.mark.slow
def test_tokens_equal_those_of_the_plain_algorithm() -> None:
    tokenizer = tiktoken_tokenizer(ranks(), _QWEN_PATTERN, SPECIAL)
    texts = varied_texts(10_000, (*SPECIAL, "<|im_end|>\n", "<|im_end|>\u0338", "<|extra_0|>"))
    normal = [unicodedata.normalize("NFC", text) for text in texts]
    # The tokenizers library does not know the order of combining characters of newer versions of Unicode.
    other = [text for text, same in zip(texts, normal, strict=True) if normalizers.NFC().normalize_str(text) != same]
    assert len(other) < 5
    found = {text: tokenizer.encode(text).ids for text in texts if text not in other}
    wrong = [
        (text, ids, expected)
        for text, ids in found.items()
        if ids != (expected := plain_tokens(text, ranks(), SPECIAL))
    ]
    assert wrong == []
    used = {token for ids in found.values() for token in ids}
    assert used >= {*SPECIAL.values()}
    assert len(used - set(range(256))) > 80  # merged tokens
    for text, ids in found.items():
        assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_a_part_that_is_a_token_is_not_merged() -> None:
    # "xbc" is not reached by merging: neither "xb" nor "bc" is a token
    found = {**{bytes([byte]): byte for byte in range(256)}, b"ab": 256, b"xbc": 257}
    tokenizer = tiktoken_tokenizer(found, _QWEN_PATTERN, {})
    assert tokenizer.encode("xbc").ids == [257]
    assert tokenizer.encode("xbcd").ids == plain_tokens("xbcd", found, {"<|endoftext|>": 258})


def test_a_file_of_ranks_is_read(tmp_path: Path) -> None:
    file = tmp_path / "qwen.tiktoken"
    file.write_bytes(rank_lines(ranks()))
    assert read_ranks(file) == ranks()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the ids of its 0 tokens are not 0 to -1: expected the ranks of the published checkpoint"),
        (b"YQ==", "line 1 is not a token in base64 with its id"),
        (b"YQ== 0\nYg== x", "line 2 is not a token in base64 with its id"),
        (b"YQ= 0", "line 1 is not a token in base64 with its id"),
        (b"YQ== 1", "the ids of its 1 tokens are not 0 to 0"),
        (b"YQ== 0", "has no token for the byte 0: expected the ranks of the published checkpoint; copy or download"),
        (b"version https://git-lfs.github.com/spec/v1", "line 1 is not a token in base64 with its id"),
    ],
)
def test_a_damaged_file_of_ranks_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "qwen.tiktoken"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_ranks(file)
