"""Words: tokens as a reader of the page sees them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from spaceport.runtime.trace.record import Record, ThreadRecord

_JOINERS = "\u200c\u200d"  # part of how words and signs are written
_NO_CHARACTERS = range(0xFDD0, 0xFDF0)


def visible(text: str) -> str:
    """A text in which each character can be seen, and that every page can hold."""
    return text if text.isprintable() else "".join(map(_sign, text))


def quoted(text: str) -> str:
    """A text on one line, so that its spaces can be seen."""
    return f"“{visible(text).replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def counted(count: int, thing: str) -> str:
    """So many things."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def number(value: float) -> str:
    """A number to three digits, or to its last whole one."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def name_of(record: Record, token: int) -> str:
    """A token by its text, or by what it is for."""
    if text := record.texts.get(token):
        return quoted(text)
    tokens = record.tokens
    roles = dict.fromkeys(tokens.mask, "[M]") | dict.fromkeys(tokens.end, "[End]")
    return (roles | {tokens.fork: "[Fork]", tokens.child: "[Child]"}).get(token, f"#{token}")


def names_of(record: Record, tokens: Iterable[int]) -> str:
    """Tokens by their names."""
    return " ".join(name_of(record, token) for token in tokens)


def name_of_thread(thread: ThreadRecord) -> str:
    """A thread by its path."""
    return f"thread {'.'.join(map(str, thread.path))}" if thread.path else "spine"


def _sign(character: str) -> str:
    """The character itself, or a sign for one that would not be seen, turns the line around or is none."""
    code = ord(character)
    if character in "\n\t" or character in _JOINERS:
        return character
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs")
    if unseen or code in _NO_CHARACTERS or code & 0xFFFE == 0xFFFE:
        return f"⟨{code:02X}⟩"
    return character
