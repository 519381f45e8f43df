"""How the answers to a request use tools, and their texts as messages with calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.tool_calls.functions import FORMATS, ToolFormat, ToolFunction
from spaceport.runtime.tool_calls.parser import MOST_CALLS, CallPart, MessagePart, ToolCallParser, other_format
from spaceport.serving.service import log

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """How the answer to a chat request uses tools; without functions, its text has no calls."""

    tool_format: ToolFormat
    functions: tuple[ToolFunction, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # as the chat template renders them
    grammar: Grammar | None = None  # of an answer that has to call functions
    parallel: bool = True
    opening: int | None = None  # token that opens calls, if it is a special one
    model: str = ""  # its name, for the log

    @property
    def enforced(self) -> bool:
        """Whether the answer has to consist of calls."""
        return self.grammar is not None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether calls can be found only if the text shows special tokens."""
        return bool(self.functions) and self.opening is not None

    def parser(self) -> ToolCallParser | None:
        """A parser for one choice; None: its text is content."""
        if not self.functions:
            return None
        return ToolCallParser(
            self.tool_format,
            [function.name for function in self.functions],
            most_calls=MOST_CALLS if self.parallel else 1,
            constrained=self.enforced,
            opened=self.enforced and self.opening is not None,
        )

    def call_id(self) -> str:
        if self.tool_format.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


NO_TOOLS = ToolUse(FORMATS["json"])


@cache
def _log_other_format(model: str, other: str, own: str) -> None:
    """Log, once for each model and format: an agent's answers would repeat it."""
    log.info("%s writes calls in the format %s, expected %s: try --tool-format %s", model, other, own, other)


class MessageText:
    """The text of one choice, which comes in pieces, as the fields of OpenAI's messages and deltas."""

    def __init__(self, tools: ToolUse = NO_TOOLS) -> None:
        self._tools = tools
        self._parser = tools.parser()
        self._text = ""  # so far, if it may have calls

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.calls > 0

    def parts(self, text: str) -> list[MessagePart]:
        """The parts of the message that a piece of text adds."""
        if self._parser is None:
            return [text] if text else []
        self._text += text
        return self._parser.push(text)

    def last_parts(self) -> list[MessagePart]:
        """The parts that the end of the text adds; calls in another format than the model's are logged."""
        if self._parser is None:
            return []
        parts, own = self._parser.finish(), self._tools.tool_format
        if not self._parser.calls or self._parser.has_other_format:
            names = [function.name for function in self._tools.functions]
            if (other := other_format(self._text, own, names)) is not None:
                _log_other_format(self._tools.model, other, own.name)
        return parts

    def delta(self, parts: list[MessagePart]) -> dict[str, Any]:
        """Parts of the message as a delta; empty if there are none."""
        content = "".join(part for part in parts if isinstance(part, str))
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                continue
            if calls and calls[-1]["index"] == part.index:
                calls[-1]["function"]["arguments"] += part.arguments
            else:
                calls.append(self._call(part))
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def message(self, text: str) -> dict[str, Any]:
        """The message with this text."""
        delta = self.delta([*self.parts(text), *self.last_parts()])
        calls = delta.get("tool_calls", ())
        for call in calls:
            del call["index"]
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": self._tools.call_id(), "type": "function", "function": function}
