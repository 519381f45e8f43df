"""SentencePiece tokenizers: tokens and text equal those of the sentencepiece package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.sentencepiece_tokenizer import read_pieces, sentencepiece_tokenizer
from support.published_checkpoints import sentencepiece_model
from support.varied_texts import varied_texts

TEXTS = 10_000

# ChatGLM3 has a prefix, InternLM v1 has user-defined pieces.
MODELS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "no prefix, user-defined pieces": {"dummy_prefix": False, "user_defined": ("<eoh>", "<eoa>", "<eo")},
    "no extra whitespace": {"extra_whitespace": True},
    "no prefix, no extra whitespace": {"dummy_prefix": False, "extra_whitespace": True},
}


def written(folder: Path, **options: Any) -> Path:
    file = folder / "tokenizer.model"
    file.write_bytes(sentencepiece_model(**options))
    return file


def with_changes(folder: Path, **changes: Any) -> Path:
    """A model file with changed entries, named `part__entry`, or with another type of its last piece."""
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model())
    for name, value in changes.items():
        part, _, entry = name.partition("__")
        setattr(model.pieces[-1] if part == "piece" else getattr(model, part), entry, value)
    file = folder / "tokenizer.model"
    file.write_bytes(model.SerializeToString())
    return file


@pytest.mark.slow
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_tokens_and_text_equal_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    file = written(tmp_path, **options)
    original = SentencePieceProcessor(model_file=str(file))
    tokenizer = sentencepiece_tokenizer(read_pieces(file), {})
    texts = varied_texts(TEXTS, ("<eoh>", "<eoa>", "<eo", "<s>", "</s>", "<unk>", "<0x0A>"))
    expected = original.encode(texts)
    found = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert [(text, one, other) for text, one, other in zip(texts, found, expected, strict=True) if one != other] == []
    assert tokenizer.decode_batch(found, skip_special_tokens=False) == original.decode(expected)
    used = {original.id_to_piece(token) for ids in expected for token in ids}
    assert {"<0xF0>", "<0x80>", "▁the", "你好"} <= used


def test_text_between_special_tokens_is_tokenized_on_its_own(tmp_path: Path) -> None:
    file = written(tmp_path)
    original = SentencePieceProcessor(model_file=str(file))
    last = original.get_piece_size()
    tokenizer = sentencepiece_tokenizer(read_pieces(file), {"<|user|>": last, "[gMASK]": last + 1}, ("[gMASK]",))
    found = tokenizer.encode("the ship<|user|>\n answer<|user|>", add_special_tokens=False).ids
    assert found == [*original.encode("the ship"), last, *original.encode("\n answer"), last]
    assert tokenizer.decode([last, *original.encode("the ship")], skip_special_tokens=True) == "the ship"
    assert tokenizer.encode("[gMASK]", add_special_tokens=False).ids == original.encode("[gMASK]")
    assert tokenizer.id_to_token(last + 1) == "[gMASK]"


def test_the_names_of_byte_and_control_pieces_are_text(tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model())
    known = {piece.piece for piece in model.pieces}
    for index, piece in enumerate(("<", "0", "x", "A", ">", "s", "<0", "<0x", "0A", "<0x0A", "<s")):
        if piece not in known:
            model.pieces.add(piece=piece, score=-10_000.0 - index)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model.SerializeToString())
    original = SentencePieceProcessor(model_file=str(file))
    tokenizer = sentencepiece_tokenizer(read_pieces(file), {})
    for text in ("<0x0A>", "a<s>b", "\n<0x0A>"):
        assert tokenizer.encode(text).ids == original.encode(text)
        assert {"<0x0A>", "<s>"}.isdisjoint(tokenizer.encode(text.replace("\n", "")).tokens)


def test_every_piece_has_its_id(tmp_path: Path) -> None:
    file = written(tmp_path, dummy_prefix=False, user_defined=("<eoh>",))
    original = SentencePieceProcessor(model_file=str(file))
    tokenizer = sentencepiece_tokenizer(read_pieces(file), {})
    pieces = [original.id_to_piece(token) for token in range(original.get_piece_size())]
    assert [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())] == pieces


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "unigram"}, "351 pieces of model type 1: expected a byte-pair encoding, as ChatGLM3"),
        ({"bytes_too": False, "pieces": 200}, "has no byte fallback: expected a piece for each byte; add a"),
        ({"normalizer": "nmt_nfkc"}, "normalizes characters (nmt_nfkc): expected the normalizer 'identity'"),
        ({"user_defined": ("<eoh>",)}, "has both a prefix of ▁ and the user-defined piece '<eoh>': expected only one"),
    ],
    ids=["unigram", "no bytes", "normalizer", "user-defined"],
)
def test_a_model_that_cannot_be_converted_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_pieces(written(tmp_path, **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer_spec__treat_whitespace_as_suffix": True}, "its words have no whitespace before them"),
        ({"normalizer_spec__escape_whitespaces": False}, "its words have no whitespace before them"),
        ({"denormalizer_spec__precompiled_charsmap": b"x"}, "has a denormalizer or unused pieces: expected neither"),
        ({"piece__type": 5}, "has a denormalizer or unused pieces: expected neither"),
        ({"piece__piece": "世e魑"}, "piece '世e魑' has a character that is no piece: expected a piece for each"),
    ],
)
def test_what_the_tokenizers_library_lacks_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_pieces(with_changes(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"no protocol buffer", b"\x0a\x7fshort"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.model: (not a SentencePiece model|0 pieces)"):
        read_pieces(file)
