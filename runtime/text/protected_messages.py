"""Protected messages: chat messages whose texts cannot become control tokens when a template has rendered them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.control_tokens import ControlTokens, Span

_STAND_INS = range(0x10F000, 0x10FFFD)  # private use characters


class ProtectedText(NamedTuple):
    """A rendered text, and the characters in it that must not become control tokens."""

    text: str
    protected: tuple[Span, ...] = ()


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


def restored(text: str, stand_ins: dict[str, str]) -> ProtectedText:
    """A rendered text with the original characters instead of their stand-ins."""
    if not stand_ins:
        return ProtectedText(text)
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for piece in re.split(f"([{''.join(stand_ins)}])", text):
        original = stand_ins.get(piece, piece)
        if original is not piece:
            spans.append((length, length + len(original)))
        pieces.append(original)
        length += len(original)
    return ProtectedText("".join(pieces), tuple(spans))


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
