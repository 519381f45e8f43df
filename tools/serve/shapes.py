"""Shapes: how answers look to clients of the chat endpoint and of the text endpoint, whole and in events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.generation import Completion
from spaceport.tools.serve.answers import chat_logprobs, finish_reason, own_report, text_logprobs


@dataclass
class Shape:
    """What all objects of one answer have in common."""

    model: str
    fingerprint: str
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
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChatShape(Shape):
    """Answers of the chat endpoint."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": chat_logprobs(completion.logprobs) if logprobs else None,
            "finish_reason": finish_reason(completion.ending),
            "spaceport": own_report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream."""
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, index: int, text: str, found: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice in an event with text."""
        choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "finish_reason": None}
        if found is not None:
            choice["logprobs"] = chat_logprobs(found)
        return choice

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        return {
            "index": index,
            "delta": {},
            "finish_reason": finish_reason(completion.ending),
            "spaceport": own_report(completion),
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
            "spaceport": own_report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream: a text answer has no such event."""
        return []

    def delta(self, index: int, text: str, found: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice in an event with text."""
        logprobs = None if found is None else text_logprobs(found, [each.text for each in found])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        reason = finish_reason(completion.ending)
        return {"index": index, "text": "", "finish_reason": reason, "spaceport": own_report(completion)}
