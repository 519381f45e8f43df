"""Parts: what a text with calls of functions consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallPart:
    """A part of a call: the first one has the name of its function, the others more of its arguments."""

    index: int  # of the call in the text
    arguments: str  # a piece of their JSON text
    name: str | None = None


Part = str | CallPart


def joined(parts: Iterable[Part]) -> tuple[str, list[tuple[str, str]]]:
    """The text among the parts, and the name and arguments of each call."""
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.name is not None:
            calls.append((part.name, part.arguments))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return "".join(texts), calls
