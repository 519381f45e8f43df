"""Spelling: the text and the bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import PanicsContained

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte of a tokenizer with byte fallback


class TokenSpelling(NamedTuple):
    """What one token stands for."""

    text: str  # with U+FFFD for bytes that are no complete character; special tokens by their name
    raw: bytes  # what the token adds to a text; empty for special tokens


@dataclass
class Speller:
    """Spells the tokens of a tokenizer, each as it stands behind other text."""

    tokenizer: Tokenizer
    _known: dict[int, TokenSpelling] = field(default_factory=dict, repr=False)

    def spell(self, token: int) -> TokenSpelling:
        """The text and the bytes of a token; both are empty for an id that the tokenizer does not have."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spelled(token)
        return found

    def _spelled(self, token: int) -> TokenSpelling:
        content = self.tokenizer.id_to_token(token)
        if content is None:
            return TokenSpelling("", b"")
        if token in self._special:
            return TokenSpelling(content, b"")
        raw = self._bytes(token, content)
        return TokenSpelling(raw.decode("utf-8", "replace"), raw)

    def _bytes(self, token: int, content: str) -> bytes:
        if "ByteLevel" in self._decoders:
            known = all(character in _BYTE_OF for character in content)
            return bytes(_BYTE_OF[character] for character in content) if known else content.encode()
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(content)):
            return bytes((int(byte[1], 16),))
        # Decoders treat the first token of a text apart, so the text of the second of two equal tokens counts.
        with PanicsContained(f"tokenizers decoded token {token}"):
            once, twice = (str(self.tokenizer.decode([token] * count)) for count in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else content).encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of decoders that the tokenizer applies."""
        decoder = self.tokenizer.decoder
        return frozenset() if decoder is None else frozenset(_kinds(json.loads(decoder.__getstate__())))


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield str(decoder["type"])
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, as GPT-2 defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of()
