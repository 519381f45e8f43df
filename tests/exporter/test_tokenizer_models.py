"""Tokenizer models: SentencePiece and tiktoken files give the tokens of the sentencepiece package and of the plain algorithm."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer, normalizers

from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.tokenizer_models import (
    QWEN_PATTERN,
    read_pieces,
    read_ranks,
    sentencepiece_tokenizer,
    tiktoken_tokenizer,
)
from support.published_checkpoints import rank_lines, ranks, sentencepiece_model
from support.small_tokenizers import varied_texts

TEXTS = 4_000
MADE = sentencepiece_model_pb2.ModelProto.FromString

# ChatGLM3 has a prefix, InternLM v1 has user-defined pieces.
MODELS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "no prefix, user-defined pieces": {"add_dummy_prefix": False, "user_defined_symbols": "<eoh>,<eoa>,<eo"},
    "no extra whitespace": {"remove_extra_whitespaces": True},
    "no prefix, no extra whitespace": {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
}


def written(folder: Path, content: bytes) -> Path:
    (folder / "tokenizer.model").write_bytes(content)
    return folder / "tokenizer.model"


def both(folder: Path, content: bytes, **special: Any) -> tuple[SentencePieceProcessor, Tokenizer]:
    """The tokenizers of the sentencepiece package and of the exporter."""
    file = written(folder, content)
    return SentencePieceProcessor(model_file=str(file)), sentencepiece_tokenizer(file, **special)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_tokens_and_text_equal_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    original, tokenizer = both(tmp_path, sentencepiece_model(**options))
    texts = varied_texts(TEXTS, ("<eoh>", "<eoa>", "<eo", "<s>", "</s>", "<unk>", "<0x0A>"))
    expected = original.encode(texts)
    found = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert [(text, one, other) for text, one, other in zip(texts, found, expected, strict=True) if one != other] == []
    assert tokenizer.decode_batch(found, skip_special_tokens=False) == original.decode(expected)
    pieces = [original.id_to_piece(token) for token in range(original.get_piece_size())]
    assert {"<0xF0>", "<0x80>", "▁the", "你好"} <= {pieces[token] for ids in expected for token in ids}
    assert [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())] == pieces


def test_text_between_special_tokens_is_tokenized_on_its_own(tmp_path: Path) -> None:
    last = 480
    added = ("<|user|>", "[gMASK]")
    original, tokenizer = both(tmp_path, sentencepiece_model(), added=added, unused=("[gMASK]",))
    assert original.get_piece_size() == last
    found = tokenizer.encode("the ship<|user|>\n answer<|user|>", add_special_tokens=False).ids
    assert found == [*original.encode("the ship"), last, *original.encode("\n answer"), last]
    assert tokenizer.decode([last, *original.encode("the ship")], skip_special_tokens=True) == "the ship"
    assert tokenizer.encode("[gMASK]", add_special_tokens=False).ids == original.encode("[gMASK]")
    assert tokenizer.id_to_token(last + 1) == "[gMASK]"


def test_the_names_of_byte_and_control_pieces_are_text(tmp_path: Path) -> None:
    model = MADE(sentencepiece_model())
    known = {piece.piece for piece in model.pieces}
    for index, piece in enumerate(("<", "0", "x", "A", ">", "s", "<0", "<0x", "0A", "<0x0A", "<s")):
        if piece not in known:
            model.pieces.add(piece=piece, score=-10_000.0 - index)
    original, tokenizer = both(tmp_path, model.SerializeToString())
    for text in ("<0x0A>", "a<s>b", "\n<0x0A>"):
        assert tokenizer.encode(text).ids == original.encode(text)
        assert {"<0x0A>", "<s>"}.isdisjoint(tokenizer.encode(text.replace("\n", "")).tokens)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"model_type": "unigram"}, {}, "351 pieces of model type 1: expected a byte-pair encoding, as ChatGLM3"),
        ({"byte_fallback": False, "vocab_size": 200}, {}, "has no byte fallback: expected a piece for each byte; add"),
        ({"normalization_rule_name": "nmt_nfkc"}, {}, "normalizes characters (nmt_nfkc): expected the normalizer"),
        ({"user_defined_symbols": "<eoh>"}, {}, "has both a prefix of ▁ and the user-defined piece '<eoh>': expected"),
        ({}, {"trainer_spec__treat_whitespace_as_suffix": True}, "its words have no whitespace before them"),
        ({}, {"normalizer_spec__escape_whitespaces": False}, "its words have no whitespace before them"),
        ({}, {"denormalizer_spec__precompiled_charsmap": b"x"}, "has a denormalizer or unused pieces: expected"),
        ({}, {"piece__type": 5}, "has a denormalizer or unused pieces: expected neither"),
        ({}, {"piece__piece": "世e魑"}, "piece '世e魑' has a character that is no piece: expected a piece for each"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = MADE(sentencepiece_model(**options))
    for name, value in changes.items():
        part, _, entry = name.partition("__")
        setattr(model.pieces[-1] if part == "piece" else getattr(model, part), entry, value)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_pieces(written(tmp_path, model.SerializeToString()))


@pytest.mark.parametrize("content", [b"", b"no protocol buffer", b"\x0a\x7fshort"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.model: (not a SentencePiece model|0 pieces)"):
        read_pieces(written(tmp_path, content))


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
            for word in regex.findall(QWEN_PATTERN, part):
                ids += merged(word.encode(), found)
    return ids


@pytest.mark.slow
def test_tokens_equal_those_of_the_plain_algorithm(tmp_path: Path) -> None:
    tokenizer = tiktoken_tokenizer(written(tmp_path, rank_lines(ranks())), QWEN_PATTERN, tuple(SPECIAL))
    texts = varied_texts(TEXTS, (*SPECIAL, "<|im_end|>\n", "<|im_end|>\u0338", "<|extra_0|>"))
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


def test_ranks_that_merging_does_not_reach_and_equal_results_are_merged_as_by_the_plain_algorithm(
    tmp_path: Path,
) -> None:
    """ "xbc" is a token, but neither "xb" nor "bc" is one; "aba" has two pairs that make it."""
    found = {bytes([byte]): byte for byte in range(256)} | {b"ba": 256, b"ab": 257, b"xbc": 258, b"aba": 259}
    tokenizer = tiktoken_tokenizer(written(tmp_path, rank_lines(found)), QWEN_PATTERN, ())
    assert tokenizer.encode("xbc").ids == [258]
    for text in ("xbcd", "aba", "abaaba", "ababab"):
        assert tokenizer.encode(text).ids == plain_tokens(text, found, SPECIAL)


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
    file.write_bytes(rank_lines(ranks()))
    assert read_ranks(file) == ranks()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_ranks(file)
