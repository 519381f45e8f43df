"""Final message: where the last message ends in a rendered chat, so that a completion continues it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from spaceport.graphs.contract.faults import OptionFault


def with_end_mark(messages: Sequence[Any]) -> tuple[list[Any], str]:
    """Messages with a mark at the end of the last one's text, and the mark, which ends with a space."""
    mark = f"\ue000{secrets.randbits(64)} "
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + mark}], mark
    parts = list(content) if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], dict) and isinstance(parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": parts[index]["text"] + mark}
            return [*others, {**last, "content": parts}], mark
    raise OptionFault("continue_final_message: the last message has no text: expected a content to continue")


def cut_at_mark(text: str, mark: str) -> str:
    """A rendered chat up to the mark; if the template removes spaces around contents, without those before the mark."""
    end = text.rfind(mark.rstrip())
    if end < 0:
        raise OptionFault(
            "continue_final_message: the chat template leaves out or changes the text of the last message: expected a "
            "message that it renders as it is, such as one of the assistant"
        )
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()
