"""Shapes: how answers look to clients of the chat endpoint and of the text endpoint, whole and in events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spaceport.runtime.scheduling.request import Completion
from spaceport.tools.serve.answers import chat_logprobs, finish_reason, own_report, text_logprobs
from spaceport.tools.serve.message_text import MessageText
from spaceport.tools.serve.progress import Progress
from spaceport.tools.serve.request_inputs import NO_TOOLS, ToolUse
from spaceport.tools.serve.service import ServedModel
from spaceport.tools.serve.traces import trace_report


@dataclass
class Shape:
    """What all objects of one answer have in common."""

    model: ServedModel
    key: str  # id of the request
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]  # of the answer's id
    whole: ClassVar[str]  # kind of a whole answer
    part: ClassVar[str]  # kind of an event

    @property
    def id(self) -> str:
        """The answer's id."""
        return f"{self.prefix}-{self.key}"

    def answer(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer."""
        return {**self._head(self.whole), "choices": list(choices), **more}

    def event(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An event of a streamed answer."""
        return {**self._head(self.part), "choices": list(choices), **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def _report(self, completion: Completion) -> dict[str, Any]:
        """What only this service reports about a choice."""
        report = own_report(completion)
        if completion.trace is not None:
            report["trace"] = trace_report(completion.trace, self.model.runtime.tokenizer)
        return report


@dataclass
class ChatShape(Shape):
    """Answers of the chat endpoint."""

    tools: ToolUse = NO_TOOLS
    texts: dict[int, MessageText] = field(default_factory=dict)  # of each streamed choice

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""
        text = MessageText(self.tools)
        return {
            "index": index,
            "message": text.message(completion.text),
            "logprobs": chat_logprobs(completion.logprobs) if logprobs else None,
            "finish_reason": finish_reason(completion.ending, text.has_calls),
            "spaceport": self._report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream."""
        self.texts[index] = MessageText(self.tools)
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """The choice in an event with what a step added; empty if that is nothing yet."""
        text = self.texts[index]
        delta = text.delta(text.parts(progress.text))
        if not delta and not progress.logprobs and not progress.extras:
            return []
        choice: dict[str, Any] = {"index": index, "delta": delta or {"content": ""}, "finish_reason": None}
        if progress.logprobs is not None:
            choice["logprobs"] = chat_logprobs(progress.logprobs)
        return [choice | progress.extras]

    def rest(self, index: int) -> list[dict[str, Any]]:
        """The choice in an event with text that was held back; empty if there is none."""
        text = self.texts[index]
        delta = text.delta(text.last_parts())
        return [{"index": index, "delta": delta, "finish_reason": None}] if delta else []

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        return {
            "index": index,
            "delta": {},
            "finish_reason": finish_reason(completion.ending, self.texts[index].has_calls),
            "spaceport": self._report(completion),
        }


class TextShape(Shape):
    """Answers of the text endpoint."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, completion: Completion, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""
        found = completion.logprobs
        return {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(found, [each.text for each in found]) if logprobs else None,
            "finish_reason": finish_reason(completion.ending),
            "spaceport": self._report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream: a text answer has no such event."""
        return []

    def delta(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """The choice in an event with what a step added; empty if that is nothing yet."""
        if progress.is_empty:
            return []
        found = progress.logprobs
        logprobs = None if found is None else text_logprobs(found, [each.text for each in found])
        choice = {"index": index, "text": progress.text, "logprobs": logprobs, "finish_reason": None}
        return [choice | progress.extras]

    def rest(self, index: int) -> list[dict[str, Any]]:
        """The choice in an event with text that was held back: a text answer holds none back."""
        return []

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        reason = finish_reason(completion.ending)
        return {"index": index, "text": "", "finish_reason": reason, "spaceport": self._report(completion)}
