"""Tokenizers of the tokenizers library from vocabularies of others: SentencePiece, tiktoken, and merges of bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

from spaceport.graphs.contract.faults import CheckpointError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_PATTERN = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3_PATTERN = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"

_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 4, 5, 6  # types of pieces
_BPE = 2  # type of model
_SPACE = "▁"
_ALL = 2**31 - 1  # spaces before a text


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model."""

    file: Path
    model: Any  # the parsed protocol buffer

    def of(self, *kinds: int) -> dict[str, int]:
        """The ids of the pieces of these types; without types, of all."""
        return {piece.piece: token for token, piece in enumerate(self.model.pieces) if not kinds or piece.type in kinds}

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
    _check_algorithm(pieces)
    _check_normalizer(pieces)
    return pieces


def _check_algorithm(pieces: Pieces) -> None:
    """Raise for another algorithm than byte-pair encoding with byte fallback, and for pieces that it cannot reach."""
    trainer = pieces.model.trainer_spec
    if not len(pieces) or trainer.model_type != _BPE:
        pieces.refuse(
            f"{len(pieces)} pieces of model type {trainer.model_type}",
            "a byte-pair encoding, as ChatGLM3 and InternLM v1 have it",
        )
    if not trainer.byte_fallback or len(pieces.of(_BYTE)) != 256:
        pieces.refuse("has no byte fallback", "a piece for each byte")
    normal = pieces.of(_NORMAL)
    unreachable = next((piece for piece in normal if any(character not in normal for character in piece)), None)
    if unreachable is not None:
        pieces.refuse(f"piece {unreachable!r} has a character that is no piece", "a piece for each character")


def _check_normalizer(pieces: Pieces) -> None:
    """Raise for texts that are changed before they are tokenized, other than in their spaces, or afterwards."""
    normalizer, user_defined = pieces.model.normalizer_spec, pieces.of(_USER_DEFINED)
    if pieces.model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        pieces.refuse("its words have no whitespace before them", "whitespace as ▁ before a word")
    if normalizer.precompiled_charsmap:
        # That of the tokenizers library maps graphemes: it loses some combining characters.
        pieces.refuse(f"normalizes characters ({normalizer.name})", "the normalizer 'identity'")
    if pieces.model.denormalizer_spec.precompiled_charsmap or pieces.of(_UNUSED):
        pieces.refuse("has a denormalizer or unused pieces", "neither")
    if normalizer.add_dummy_prefix and user_defined:
        # The tokenizers library tokenizes the text behind such a piece as text of its own, with another prefix.
        pieces.refuse(
            f"has both a prefix of ▁ and the user-defined piece {next(iter(user_defined))!r}", "only one of them"
        )


def _set_spaces(tokenizer: Tokenizer, spaces: Any) -> None:
    """Change the spaces of texts as a SentencePiece model says, and change them back when tokens become text."""
    normalizer: list[Any] = []
    decoder: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces.remove_extra_whitespaces:
        normalizer += [
            normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
        decoder.append(decoders.Strip(" ", _ALL, 0))
    if spaces.add_dummy_prefix:
        normalizer.append(normalizers.Prepend(_SPACE))
        if not spaces.remove_extra_whitespaces:
            decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence([*normalizer, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(decoder)


def sentencepiece_tokenizer(
    file: Path,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    unused: Collection[str] = (),
    begin: Sequence[str] = (),
) -> Tokenizer:
    """The tokenizer of a SentencePiece model with special tokens; text between these is tokenized as text of its own.

    Special tokens are pieces, or `added` behind the last piece. Those in `unused` have their ids, but no text becomes
    them. Texts begin with the tokens in `begin`."""
    pieces = read_pieces(file)
    vocabulary = {**pieces.of(), **{text: len(pieces) + index for index, text in enumerate(added)}}
    if missing := [text for text in special if text not in vocabulary]:
        pieces.refuse(f"has no piece {missing[0]!r}", "the pieces of the published model")
    scores = {piece.piece: piece.score for piece in pieces.model.pieces if piece.type == _NORMAL}
    unknown = next(iter(pieces.of(_UNKNOWN)), None)
    merges = generate_merges(scores, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True))
    _set_spaces(tokenizer, pieces.model.normalizer_spec)
    tokens = dict.fromkeys((*special, *added))
    add_tokens(tokenizer, [text for text in tokens if text not in unused])
    add_tokens(tokenizer, [text for text in pieces.of(_USER_DEFINED) if text not in tokens], special=False)
    if begin:
        begin_texts(tokenizer, begin)
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens in a file of tiktoken: one line for each, with the token in base64 and its id, which is its rank."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        _refuse_ranks(file, f"line {len(ranks) + 1} is not a token in base64 with its id ({error})")
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        _refuse_ranks(file, f"the ids of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        _refuse_ranks(file, f"has no token for the byte {missing}")
    return ranks


def _refuse_ranks(file: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"{file}: {problem}: expected the ranks of the published checkpoint; copy or download the file again"
    )


def tiktoken_tokenizer(file: Path, pattern: str, special: Sequence[str]) -> Tokenizer:
    """The tokenizer with the ranks in a file: text in normal form C is split by a pattern, and each part is merged.

    Special tokens are searched in the normalized text, as the original code does."""
    ranks, letters = read_ranks(file), bytes_to_unicode()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # A pair is merged before another one if its result has the lower rank, and of equal results the longer left token.
    merges = generate_merges(ranks, {token: -rank for token, rank in ranks.items()})
    tokenizer = byte_level_tokenizer(
        {names[token]: rank for token, rank in ranks.items()},
        [(names[left], names[right]) for left, right in merges],
        byte_level_splitter(pattern),
        whole_parts=True,
    )
    tokenizer.normalizer = normalizers.NFC()
    add_tokens(tokenizer, special, normalized=True)
    return tokenizer


def byte_level_splitter(pattern: str | None, gpt2: bool = False) -> pre_tokenizers.PreTokenizer:
    """Split text by a pattern, then by that of GPT-2 if `gpt2`, and write its bytes as letters."""
    as_bytes: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    if pattern is None:
        return as_bytes
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), as_bytes])


def byte_level_tokenizer(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splitter: pre_tokenizers.PreTokenizer,
    whole_parts: bool,
) -> Tokenizer:
    """A byte-pair encoding of bytes; with `whole_parts`, a part of the text that is a token is not merged.

    Merging would not reach some of these tokens."""
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), list(merges), ignore_merges=whole_parts))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_tokens(tokenizer: Tokenizer, texts: Sequence[str], special: bool = True, normalized: bool = False) -> None:
    """Recognize tokens in texts, in the normalized text or before."""
    tokens = [AddedToken(text, special=special, normalized=normalized) for text in texts]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)


def begin_texts(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Begin each text with these tokens."""
    before = " ".join(tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A",
        pair=f"{before} $A $B",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in tokens],
    )


def transformers_tokenizer(tokenizer: Tokenizer, special: Mapping[str, str], template: str | None = None) -> Any:
    """The tokenizer of transformers with special tokens, by their role: bos, eos, unk or pad."""
    named = {f"{role}_token": text for role, text in special.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **named
    )
