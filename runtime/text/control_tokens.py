"""Control tokens: encodes text and messages so that special tokens which they spell out stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import itemgetter, not_
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

    def first_beyond(self, length: int) -> int:
        """Index of the first token that reaches beyond this many characters; the number of tokens if none does."""
        return next((index for index, end in enumerate(self.ends) if end > length), len(self.ids))


class _Mark(NamedTuple):
    """Characters of the text that are encoded as a separator; none at the border of two characters."""

    start: int
    end: int
    token: int | None  # the control token that the separator stands for; None: it only separates two characters


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a bundle, and the encoding of text that must not contain any."""

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
        found = {entry.content: token for token, entry in added.items() if entry.special or token in own}
        return {text: token for text, token in found.items() if text.strip()}

    def ids(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> list[int]:
        """The tokens of a text without control tokens in the `protected` characters, by default in the whole text.

        `special` adds the tokenizer's special tokens around the text.
        """
        found = self._unseparated(text, special, protected)
        return self._separated(text, special, protected).ids if found is None else found.ids

    def encode(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> Encoded:
        """The tokens of a text as in `ids`, with their ends in the text."""
        found = self._unseparated(text, special, protected)
        if found is None:
            return self._separated(text, special, protected)
        return Encoded(found.ids, [end for _, end in found.offsets])

    def spans(self, text: str) -> list[Span]:
        """The characters of a text that the tokenizer would turn into control tokens."""
        found = encoding_of(self.tokenizer, text, special=False)
        return [span for token, span in zip(found.ids, found.offsets, strict=True) if token in self._ids]

    def _unseparated(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoding | None:
        """The encoding of a text, unless the tokenizer alone would make control tokens of protected characters."""
        if protected:
            return None
        found = encoding_of(self.tokenizer, text, special)
        ids = found.ids
        if protected is not None or self._ids.isdisjoint(ids):
            return found
        return found if self._ids.isdisjoint(compress(ids, map(not_, found.special_tokens_mask))) else None

    def _template_tokens(self, text: str, protected: Sequence[Span]) -> list[_Mark]:
        """The control tokens outside of the protected characters."""
        masked = list(text)
        for start, end in protected:
            masked[start:end] = "x" * (end - start)
        found = encoding_of(self.tokenizer, "".join(masked), special=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [_Mark(*span, token) for token, span in pairs if token in self._ids]

    def _separated(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoded:
        """The tokens of a text that would have control tokens in its protected characters."""
        marks = self._template_tokens(text, protected) if protected else []
        for _ in range(_ATTEMPTS):
            found, joined = self._with_marks(text, marks, special)
            if not joined:
                return found
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
        found = encoding_of(self._plain, "".join([*pieces, text[position:]]), special)
        encoded, joined, left, shift = Encoded([], []), [], iter(marks), 0
        for token, (start, end), around in zip(found.ids, found.offsets, found.special_tokens_mask, strict=True):
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
        added = [{**entry, "special": True} for entry in self._settings["added_tokens"] if entry["id"] in self._ids]
        others = [entry for entry in self._settings["added_tokens"] if entry["id"] not in self._ids]
        added = sorted([*added, *others], key=itemgetter("id"))
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
        found = self._plain.token_to_id(self._separator)
        assert found is not None
        return found


@dataclass(frozen=True)
class MessageProtector:
    """Replaces spelled-out control tokens in messages by stand-ins, and restores them in the rendered text."""

    controls: ControlTokens

    def protect(self, messages: Sequence[Any]) -> tuple[Sequence[Any], dict[str, str]]:
        """The messages with stand-ins, and the text of each stand-in."""
        texts = list(_texts(messages))
        if not any(map(self._spells, texts)):
            return messages, {}
        protected = _Protected(self, set("".join(texts)))
        return protected.copy(messages), {stand_in: text for text, stand_in in protected.stand_ins.items()}

    def fragments(self, text: str) -> list[Span]:
        """The parts of a text that are a control token, or its beginning at the end of the text."""
        if not self._spells(text):
            return []
        spans = [found.span() for found in self._pattern.finditer(text)]
        if self.controls.tokenizer.normalizer is not None:
            spans = _joined([*spans, *self.controls.spans(text)])
        end = len(text.rstrip())
        start = end - self._beginning(text[:end])
        if start < end and not any(first < end and start < last for first, last in spans):
            spans.append((start, end))
        return spans

    def _spells(self, text: str) -> bool:
        """Whether a text may become a control token, alone or with text that follows."""
        if self._literal.search(text.lower()) or self._beginning(text.rstrip()):
            return True
        normalizer = self.controls.tokenizer.normalizer
        return normalizer is not None and bool(self._literal.search(normalizer.normalize_str(text).lower()))

    def _beginning(self, text: str) -> int:
        """Number of characters at the end that may be the start of a control token."""
        if text[-1:] not in self._inner:
            return 0
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:].lower() in self._beginnings), 0)

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        return _any_of({text.lower() for text in self.controls.spelled}, 0)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _any_of(self.controls.spelled, re.IGNORECASE)  # a template may change the case

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size].lower() for text in self.controls.spelled for size in range(1, len(text)))

    @cached_property
    def _inner(self) -> frozenset[str]:
        """The characters that the start of a control token can end with."""
        last = {text[-1] for text in self._beginnings}
        return frozenset(last | {sign.upper() for sign in last})

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._beginnings), default=0)


@dataclass
class _Protected:
    """A copy of messages while it is made."""

    protector: MessageProtector
    used: set[str]  # characters of the messages
    stand_ins: dict[str, str] = field(default_factory=dict)  # text -> stand-in

    def copy(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replaced(value)
        if isinstance(value, dict):
            return {self.copy(key): self.copy(item) for key, item in value.items()}
        return [self.copy(item) for item in value] if isinstance(value, list) else value

    def _replaced(self, text: str) -> str:
        pieces, position = [], 0
        for start, end in self.protector.fragments(text):
            pieces += [text[position:start], self._stand_in(text[start:end])]
            position = end
        return "".join([*pieces, text[position:]])

    def _stand_in(self, text: str) -> str:
        if text not in self.stand_ins:
            free = next((sign for sign in map(chr, _STAND_INS) if sign not in self.used), None)
            if free is None:
                raise OptionFault(
                    "the messages spell out control tokens and use all private use characters: leave one of them out"
                )
            self.used.add(free)
            self.stand_ins[text] = free
        return self.stand_ins[text]


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


def _texts(value: Any) -> Iterator[str]:
    """All texts in messages, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _any_of(texts: Any, flags: int) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)", flags)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, with overlapping ones as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found
