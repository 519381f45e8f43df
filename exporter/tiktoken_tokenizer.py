"""Tiktoken tokenizer: a file of byte-pair ranks, as tiktoken reads it, as a tokenizer of the tokenizers library."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spaceport.exporter.merges import merges_of
from spaceport.exporter.sar_config import CheckpointError


def read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens in a file of ranks: one line for each, with the token in base64 and its id."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        _refuse(file, f"line {len(ranks) + 1} is not a token in base64 with its id ({error})")
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        _refuse(file, f"the ids of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        _refuse(file, f"has no token for the byte {missing}")
    return ranks


def tiktoken_tokenizer(ranks: dict[bytes, int], pattern: str, special: dict[str, int]) -> Tokenizer:
    """The tokenizer with these ranks: text in normal form C is split by a pattern, and each part is merged.

    Special tokens are searched in the normalized text, as the original code does."""
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {written(token): rank for token, rank in ranks.items()}
    merges = [(written(left), written(right)) for left, right in merges_of(ranks)]
    # A part that is a token is not merged, even if merging would not reach it.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(special, key=special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=True) for text in in_order])
    return tokenizer


def _refuse(file: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"{file}: {problem}: expected the ranks of the published checkpoint; copy or download the file again"
    )
