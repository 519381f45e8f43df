"""Call parts: the text and the calls that parts of a message are put together to."""

from __future__ import annotations

from collections.abc import Iterable

from spaceport.runtime.tool_calls.parser import MessagePart


def joined(parts: Iterable[MessagePart]) -> tuple[str, list[tuple[str, str]]]:
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
