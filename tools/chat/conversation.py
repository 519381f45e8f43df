"""Conversation: the messages of a chat, in memory and as a file."""

from __future__ import annotations

import json
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault

_ROLES = ("system", "user", "assistant")


class ChatHistory:
    """The messages so far, the system prompt first if there is one."""

    def __init__(self, system: str | None = None) -> None:
        self._messages: list[dict[str, str]] = []
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages, as a chat template and OpenAI's API have them."""
        return [dict(message) for message in self._messages]

    @property
    def turns(self) -> int:
        """Number of user messages."""
        return sum(message["role"] == "user" for message in self._messages)

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt; None: remove it."""
        rest = [message for message in self._messages if message["role"] != "system"]
        self._messages = ([{"role": "system", "content": text}] if text else []) + rest

    def add(self, role: str, content: str) -> None:
        """Append a message."""
        self._messages.append({"role": role, "content": content})

    def reset(self) -> None:
        """Remove all messages but the system prompt."""
        self._messages = [message for message in self._messages if message["role"] == "system"]

    def undo(self) -> bool:
        """Remove the last user message and what follows; returns whether there was one."""
        found = [index for index, message in enumerate(self._messages) if message["role"] == "user"]
        if found:
            del self._messages[found[-1] :]
        return bool(found)

    def save(self, file: Path) -> None:
        """Write the messages to a file as a JSON list."""
        try:
            file.write_text(json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise InputFault(f"{file} cannot be written: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """Replace the messages by those of a file; on an error they stay as they are."""
        expected = 'expected a JSON list of {"role": "user", "content": "…"}, as /save writes'
        try:
            found = json.loads(file.read_text("utf-8"))
        except OSError as error:
            raise InputFault(f"{file} cannot be read: {error.strerror}: {expected}") from error
        except (ValueError, RecursionError) as error:
            raise InputFault(f"{file} is not JSON: {expected}") from error
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise InputFault(f"{file} has other content: {expected}")
        self._messages = [{"role": message["role"], "content": message["content"]} for message in found]


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and found.get("role") in _ROLES and isinstance(found.get("content"), str)
