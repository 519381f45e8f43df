"""Message text: the text of one choice of a chat answer as content and calls of functions."""

from __future__ import annotations

from typing import Any

from spaceport.runtime.tool_calls.parser import CallPart, MessagePart
from spaceport.tools.serve.request_inputs import NO_TOOLS, ToolUse


class MessageText:
    """The text of one choice, which comes in pieces, as the fields of OpenAI's messages and deltas."""

    def __init__(self, tools: ToolUse = NO_TOOLS) -> None:
        self._tools = tools
        self._parser = tools.parser()

    @property
    def has_calls(self) -> bool:
        """Whether a call has been found."""
        return self._parser is not None and self._parser.calls > 0

    def parts(self, text: str) -> list[MessagePart]:
        """The parts of the message that a piece of text adds."""
        if self._parser is None:
            return [text] if text else []
        return self._parser.push(text)

    def last_parts(self) -> list[MessagePart]:
        """The parts that the end of the text adds."""
        return [] if self._parser is None else self._parser.finish()

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
        found = self.delta([*self.parts(text), *self.last_parts()])
        calls = [{name: value for name, value in one.items() if name != "index"} for one in found.get("tool_calls", ())]
        content = found.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": self._tools.call_id(), "type": "function", "function": function}
