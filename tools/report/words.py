"""Words: readable names of tokens, threads and numbers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from spaceport.runtime.trace.record import ThreadRecord, TraceRecord

_JOINERS = "\u200c\u200d"  # needed inside words and emoji
_NO_CHARACTERS = range(0xFDD0, 0xFDF0)


def visible(text: str) -> str:
    """Text with invisible and invalid characters replaced by their codes."""
    return text if text.isprintable() else "".join(map(_shown, text))


def quoted(text: str) -> str:
    """Text in quotes on one line, so that its spaces are visible."""
    return f"“{visible(text).replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def counted(count: int, thing: str) -> str:
    """A count with its noun in singular or plural."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def number(value: float) -> str:
    """A number with three significant digits, or without decimals from 1000 on."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def name_of(record: TraceRecord, token: int) -> str:
    """The text of a token, its role such as [Fork], or its id."""
    if text := record.texts.get(token):
        return quoted(text)
    tokens = record.tokens
    roles = dict.fromkeys(tokens.mask, "[M]") | dict.fromkeys(tokens.end, "[End]")
    return (roles | {tokens.fork: "[Fork]", tokens.child: "[Child]"}).get(token, f"#{token}")


def names_of(record: TraceRecord, tokens: Iterable[int]) -> str:
    """The names of tokens, separated by spaces."""
    return " ".join(name_of(record, token) for token in tokens)


def name_of_thread(thread: ThreadRecord) -> str:
    """The name of a thread: root, or its path."""
    return f"thread {'.'.join(map(str, thread.path))}" if thread.path else "root"


def _shown(character: str) -> str:
    """The character, or its code if it is invisible, changes the direction of text or is invalid."""
    code = ord(character)
    if character in "\n\t" or character in _JOINERS:
        return character
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs")
    if invisible or code in _NO_CHARACTERS or code & 0xFFFE == 0xFFFE:
        return f"⟨{code:02X}⟩"
    return character
