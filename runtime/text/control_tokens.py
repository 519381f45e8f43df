"""Encodes text and messages so that special tokens which they spell out stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.text.tokenizer import encoding_of

_ATTEMPTS = 8  # a token that the model itself joins is split once more in each attempt

Span = tuple[int, int]  # indices of the first character and of the one after the last
_STAND_INS = range(0x10F000, 0x10FFFD)  # private use characters


class Encoded(NamedTuple):
    """The tokens of a text, and where each ends in it."""

    ids: list[int]
    ends: list[int]  # characters of the text before the end of each token


class _Mark(NamedTuple):
    """Characters of the text that are encoded as a separator; none at the border of two characters."""

    start: int
    end: int
    token: int | None  # the control token that the separator stands for; None: it only separates two characters


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a bundle: encodes text, and protects messages, that spell them out without meaning them."""

    tokenizer: Tokenizer
    tokens: TokenIds

    @cached_property
    def spelled(self) -> dict[str, int]:
        """Id of each control token by its text: special tokens, and the mask, fork, child and end tokens.

        A token of the ordinary vocabulary is text, also if a bundle ends or forks with it.
        """
        tokens = self.tokens
        own = {*tokens.mask, *tokens.fork_ids, tokens.child, *tokens.end}
        added = self.tokenizer.get_added_tokens_decoder()
        return {
            entry.content: token
            for token, entry in added.items()
            if (entry.special or token in own) and entry.content.strip()
        }

    def ids(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> list[int]:
        """The tokens of a text without control tokens in the `protected` characters, by default in the whole text.

        `special` adds the tokenizer's special tokens around the text.
        """
        return self._encoded(text, special, protected).ids

    def encode(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> Encoded:
        """The tokens of a text as in `ids`, with their ends in the text."""
        encoded = self._encoded(text, special, protected)
        return encoded if isinstance(encoded, Encoded) else Encoded(encoded.ids, [end for _, end in encoded.offsets])

    def protect(self, messages: Any) -> tuple[Any, dict[str, str]]:
        """Messages with stand-ins for the control tokens that they spell out, and the text of each stand-in."""
        texts: list[str] = []
        _mapped(messages, texts.append)  # collects them
        if not any(map(self._spells, texts)):
            return messages, {}
        used = set("".join(texts))
        free_characters = (character for character in map(chr, _STAND_INS) if character not in used)
        stand_ins: dict[str, str] = {}  # by the text that each stands for

        def replaced(text: str) -> str:
            pieces, position = [], 0
            for start, end in self._fragments(text):
                fragment = text[start:end]
                if fragment not in stand_ins:
                    stand_ins[fragment] = next(free_characters, "")
                pieces += [text[position:start], stand_ins[fragment]]
                position = end
            return "".join([*pieces, text[position:]])

        protected = _mapped(messages, replaced)
        if "" in stand_ins.values():
            raise OptionFault(
                "the messages spell out control tokens and use all private use characters: leave one of them out"
            )
        return protected, {stand_in: text for text, stand_in in stand_ins.items()}

    def _encoded(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoding | Encoded:
        """The encoding of a text by the tokenizer alone, unless it makes control tokens of protected characters."""
        if not protected:
            encoding = encoding_of(self.tokenizer, text, special)
            ids = encoding.ids
            if protected is not None or self._ids.isdisjoint(ids):
                return encoding
            if self._ids.isdisjoint(compress(ids, map(not_, encoding.special_tokens_mask))):
                return encoding
        return self._separated(text, special, protected)

    def _found_in(self, text: str) -> list[_Mark]:
        """The control tokens that the tokenizer makes of a text."""
        encoding = encoding_of(self.tokenizer, text, special=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [_Mark(*span, token) for token, span in pairs if token in self._ids]

    def _separated(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoded:
        """The tokens of a text that would have control tokens in its protected characters."""
        marks: list[_Mark] = []
        if protected:  # the template's own control tokens are outside of these characters
            masked = list(text)
            for start, end in protected:
                masked[start:end] = "x" * (end - start)
            marks = self._found_in("".join(masked))
        for _ in range(_ATTEMPTS):
            encoded, joined = self._with_marks(text, marks, special)
            if not joined:
                return encoded
            for start, end in joined:
                if end - start < 2:
                    raise OptionFault(
                        f"character {start} of the prompt is {text[start:end]!r}, a control token: leave it out, or allow "
                        "control tokens with parse_special"
                    )
                middle = (start + end) // 2
                marks.append(_Mark(middle, middle, None))
            marks.sort()
        raise OptionFault("the prompt spells out control tokens: leave them out, or allow them with parse_special")

    def _with_marks(self, text: str, marks: Sequence[_Mark], special: bool) -> tuple[Encoded, list[Span]]:
        """The tokens of a text whose marks became separators, and the characters of unwanted control tokens."""
        pieces, position = [], 0
        for mark in marks:
            pieces += [text[position : mark.start], self._separator]
            position = mark.end
        encoding = encoding_of(self._plain, "".join([*pieces, text[position:]]), special)
        encoded, joined, left, shift = Encoded([], []), [], iter(marks), 0
        for token, (start, end), around in zip(
            encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            if token == self._separator_id:
                mark = next(left)
                shift += len(self._separator) - (mark.end - mark.start)
                if mark.token is None:
                    continue
                encoded.ids.append(mark.token)
                encoded.ends.append(mark.end)
                continue
            if not around and token in self._ids and not self._is_unknown(token, text[start - shift : end - shift]):
                joined.append((start - shift, end - shift))
            encoded.ids.append(token)
            encoded.ends.append(end - shift)
        return encoded, joined

    def _is_unknown(self, token: int, text: str) -> bool:
        """Whether a token stands for text that the model does not know."""
        model = self._settings["model"]
        unknown = model.get("unk_token", model.get("unk_id"))
        return unknown in (token, self.tokenizer.id_to_token(token)) and self.spelled.get(text) != token

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.spelled.values())

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without control tokens and with a separator; built for the first text that needs it."""
        added = [
            {**entry, "special": entry["special"] or entry["id"] in self._ids}
            for entry in self._settings["added_tokens"]
        ]
        tokenizer = Tokenizer.from_str(json.dumps({**self._settings, "added_tokens": added}))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(self._separator, normalized=False, special=False)])
        return tokenizer

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The content of the tokenizer's file."""
        settings: dict[str, Any] = json.loads(self.tokenizer.to_str())
        return settings

    @cached_property
    def _separator(self) -> str:
        return f"\U0010fffd{secrets.token_hex(16)}"  # no text contains it by chance, and none can be made to

    @cached_property
    def _separator_id(self) -> int:
        token = self._plain.token_to_id(self._separator)
        assert token is not None
        return token

    def _fragments(self, text: str) -> list[Span]:
        """The parts of a text that are a control token, or its beginning at the end of the text."""
        if not self._spells(text):
            return []
        spans = [match.span() for match in self._pattern.finditer(text)]
        if self.tokenizer.normalizer is not None:
            spans = _joined([*spans, *(mark[:2] for mark in self._found_in(text))])
        end = len(text.rstrip())
        start = end - self._beginning(text[:end])
        if start < end and not any(first < end and start < last for first, last in spans):
            spans.append((start, end))
        return spans

    def _spells(self, text: str) -> bool:
        """Whether a text may become a control token, alone or with text that follows."""
        if self._literal.search(text.lower()) or self._beginning(text.rstrip()):
            return True
        normalizer = self.tokenizer.normalizer
        return normalizer is not None and bool(self._literal.search(normalizer.normalize_str(text).lower()))

    def _beginning(self, text: str) -> int:
        """Number of characters at the end that may be the start of a control token."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:].lower() in self._beginnings), 0)

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        return _any_of({text.lower() for text in self.spelled}, 0)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _any_of(self.spelled, re.IGNORECASE)  # a template may change the case

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size].lower() for text in self.spelled for size in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._beginnings), default=0)


def restored(text: str, stand_ins: Mapping[str, str]) -> tuple[str, tuple[Span, ...]]:
    """A rendered text with the original characters instead of their stand-ins, and where these are."""
    if not stand_ins:
        return text, ()
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for piece in re.split(f"([{''.join(stand_ins)}])", text):
        original = stand_ins.get(piece, piece)
        if original is not piece:
            spans.append((length, length + len(original)))
        pieces.append(original)
        length += len(original)
    return "".join(pieces), tuple(spans)


def _mapped(value: Any, change: Callable[[str], object]) -> Any:
    """A copy of messages with all their texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _any_of(texts: Any, flags: int) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)", flags)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, with overlapping ones as one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined
