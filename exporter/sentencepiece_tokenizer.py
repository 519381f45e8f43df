"""SentencePiece tokenizer: a tokenizer.model with byte fallback as a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from spaceport.exporter.merges import merges_of
from spaceport.exporter.sar_config import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
_BPE = 2  # type of model
_SPACE = "▁"
_ALL = 2**31 - 1  # spaces before a text


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model."""

    file: Path
    model: Any  # the parsed protocol buffer

    def of(self, *kinds: int) -> dict[str, int]:
        """The ids of the pieces of these types."""
        return {piece.piece: token for token, piece in enumerate(self.model.pieces) if piece.type in kinds}

    def __len__(self) -> int:
        return len(self.model.pieces)

    def refuse(self, problem: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file}: {problem}: expected {expected}; add a tokenizer.json with the same tokens, which is used instead"
        )


def read_pieces(file: Path) -> Pieces:
    """The SentencePiece model in a file; raise if its tokenization cannot be converted exactly."""
    protocol: Any = sentencepiece_model_pb2
    model = protocol.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except (OSError, DecodeError) as error:
        raise CheckpointError(
            f"{file}: not a SentencePiece model ({error}): expected that of the published checkpoint; copy or download it again"
        ) from error
    pieces = Pieces(file, model)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if not len(pieces) or trainer.model_type != _BPE:
        pieces.refuse(
            f"{len(pieces)} pieces of model type {trainer.model_type}",
            "a byte-pair encoding, as ChatGLM3 and InternLM v1 have it",
        )
    if not trainer.byte_fallback or len(pieces.of(_BYTE)) != 256:
        pieces.refuse("has no byte fallback", "a piece for each byte")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        pieces.refuse("its words have no whitespace before them", "whitespace as ▁ before a word")
    if normalizer.precompiled_charsmap:
        # That of the tokenizers library maps graphemes: it loses some combining characters.
        pieces.refuse(f"normalizes characters ({normalizer.name})", "the normalizer 'identity'")
    if model.denormalizer_spec.precompiled_charsmap or pieces.of(_UNUSED):
        pieces.refuse("has a denormalizer or unused pieces", "neither")
    if normalizer.add_dummy_prefix and pieces.of(_USER_DEFINED):
        # The tokenizers library tokenizes the text behind such a piece as text of its own, with another prefix.
        pieces.refuse(
            f"has both a prefix of ▁ and the user-defined piece {next(iter(pieces.of(_USER_DEFINED)))!r}",
            "only one of them",
        )
    _check_characters(pieces)
    return pieces


def _check_characters(pieces: Pieces) -> None:
    """Raise for a piece that cannot be reached by merging, because one of its characters is no piece."""
    normal = pieces.of(_NORMAL)
    unreachable = next((piece for piece in normal if any(character not in normal for character in piece)), None)
    if unreachable is not None:
        pieces.refuse(f"piece {unreachable!r} has a character that is no piece", "a piece for each character")


def sentencepiece_tokenizer(pieces: Pieces, special: dict[str, int], unused: Collection[str] = ()) -> Tokenizer:
    """The tokenizer of a SentencePiece model with special tokens; text between these is tokenized as text of its own.

    Special tokens may be pieces, or follow the last piece. Those in `unused` have their ids, but no text becomes them.
    """
    vocabulary = {**pieces.of(_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE), **special}
    scores = {piece.piece: -piece.score for piece in pieces.model.pieces if piece.type == _NORMAL}
    unknown = next(iter(pieces.of(_UNKNOWN)), None)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges_of(scores), unk_token=unknown, byte_fallback=True))
    tokenizer.normalizer = _normalizer(pieces)
    tokenizer.decoder = _decoder(pieces)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special if text not in unused]
    )
    found = [
        AddedToken(text, special=False, normalized=False) for text in pieces.of(_USER_DEFINED) if text not in special
    ]
    tokenizer.add_tokens(found)
    return tokenizer


def _normalizer(pieces: Pieces) -> normalizers.Normalizer:
    spec = pieces.model.normalizer_spec
    steps: list[Any] = []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _decoder(pieces: Pieces) -> decoders.Decoder:
    spec = pieces.model.normalizer_spec
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", _ALL, 0))
    elif spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
