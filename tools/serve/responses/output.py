"""Output: the items of a response, as events while they are generated and as one object."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.tool_calls.parser import CallPart, MessagePart
from spaceport.tools.serve.answers import chat_logprobs
from spaceport.tools.serve.request_inputs import ToolUse

Event = dict[str, Any]


@dataclass
class Output:
    """The items of one response, which grow; each method returns the events of what it adds."""

    tools: ToolUse
    with_logprobs: bool = False
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False  # whether the last item may grow
    _logprobs: list[dict[str, Any]] = field(default_factory=list)  # of tokens whose text has not been added yet

    def add(self, parts: Iterable[MessagePart], logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        """Add parts of the answer, and the log probabilities of tokens."""
        if self.with_logprobs:
            self._logprobs += chat_logprobs(logprobs)["content"]
        found: list[Event] = []
        for part in parts:
            found += self._add_text(part) if isinstance(part, str) else self._add_call(part)
        return found

    def close(self, complete: bool = True) -> list[Event]:
        """End the last item; `complete` is whether nothing cut it off."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = "completed" if complete else "incomplete"
        return [*self._ended(item), self._event("output_item.done", item=item.copy())]

    def _ended(self, item: dict[str, Any]) -> list[Event]:
        """The events at the end of an item's text or arguments."""
        if item["type"] == "function_call":
            of_call = {"name": item["name"], "arguments": item["arguments"]}
            return [self._event("function_call_arguments.done", item_id=item["id"], **of_call)]
        (part,) = item["content"]
        if self.with_logprobs:
            part["logprobs"] += self._logprobs
        of_part = {"item_id": item["id"], "content_index": 0}
        return [
            self._event("output_text.done", **of_part, text=part["text"], logprobs=part.get("logprobs", [])),
            self._event("content_part.done", **of_part, part=part.copy()),
        ]

    def _add_text(self, text: str) -> list[Event]:
        found: list[Event] = []
        if not self._open or self.items[-1]["type"] != "message":
            found += self._begin_message()
        (part,) = self.items[-1]["content"]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        if self.with_logprobs:
            part["logprobs"] += logprobs
        of_part = {"item_id": self.items[-1]["id"], "content_index": 0}
        return [*found, self._event("output_text.delta", **of_part, delta=text, logprobs=logprobs)]

    def _add_call(self, part: CallPart) -> list[Event]:
        found: list[Event] = []
        if part.name is not None:
            call = {"type": "function_call", "call_id": self.tools.call_id(), "name": part.name, "arguments": ""}
            found += self._begin({"id": f"fc_{secrets.token_hex(12)}", **call})
        self.items[-1]["arguments"] += part.arguments
        if part.arguments:
            delta = {"item_id": self.items[-1]["id"], "delta": part.arguments}
            found.append(self._event("function_call_arguments.delta", **delta))
        return found

    def _begin_message(self) -> list[Event]:
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if self.with_logprobs:
            part["logprobs"] = []
        item_id = f"msg_{secrets.token_hex(12)}"
        found = self._begin({"id": item_id, "type": "message", "role": "assistant", "content": []})
        self.items[-1]["content"] = [part]
        return [*found, self._event("content_part.added", item_id=item_id, content_index=0, part=part.copy())]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        """End the last item, and begin another one."""
        found = self.close()
        self.items.append({**item, "status": "in_progress"})
        self._open = True
        return [*found, self._event("output_item.added", item=self.items[-1].copy())]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **fields}
