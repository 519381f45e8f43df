"""Response: the object that the Responses API answers with, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from spaceport.runtime.scheduling.request import Completion
from spaceport.tools.serve.answers import finish_reason, metrics_of, own_report, timings_of, usage_of
from spaceport.tools.serve.generations import Generations
from spaceport.tools.serve.message_text import MessageText
from spaceport.tools.serve.progress import Reported
from spaceport.tools.serve.request_inputs import ToolUse
from spaceport.tools.serve.responses.body import ResponsesBody
from spaceport.tools.serve.responses.output import Event, Output
from spaceport.tools.serve.service import ServedModel
from spaceport.tools.serve.traces import trace_report


@dataclass
class Response:
    """What all events of one response have in common, and the response so far."""

    model: ServedModel
    key: str  # id of the request
    body: ResponsesBody
    tools: ToolUse
    reported: Reported
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.output = Output(self.tools, with_logprobs=self.reported.logprobs)
        self.text = MessageText(self.tools)

    @property
    def id(self) -> str:
        """The id of the response."""
        return f"resp_{self.key}"

    def begun(self) -> dict[str, Any]:
        """The response before anything is generated."""
        return {**self._head("in_progress"), "output": [], "usage": None}

    def whole(self, running: Generations, completion: Completion) -> dict[str, Any]:
        """The response with its output."""
        complete = finish_reason(completion.ending) == "stop"
        (statistics,) = running.statistics
        usage = usage_of([statistics], [statistics])
        report = own_report(completion)
        if completion.trace is not None:
            report["trace"] = trace_report(completion.trace, self.model.runtime.tokenizer)
        return {
            **self._head("completed" if complete else "incomplete"),
            "completed_at": int(time.time()),
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": self.output.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": metrics_of([statistics]),
            "timings": timings_of([statistics]),
            "spaceport": report,
        }

    def finish(self, completion: Completion) -> list[Event]:
        """Add the text that was held back, and end the output."""
        added = self.output.add(self.text.last_parts())
        if not self.output.items:  # a response has at least one item
            added += self.output.add([""])
        return [*added, *self.output.close(finish_reason(completion.ending) == "stop")]

    def _head(self, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model.name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
            "truncation": "disabled",
        }


def whole_response(response: Response, running: Generations, completion: Completion) -> dict[str, Any]:
    """The response to a request that is not streamed."""
    response.output.add(response.text.parts(completion.text), completion.logprobs)
    response.finish(completion)
    return response.whole(running, completion)


async def events_of(response: Response, running: Generations) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response; the completion ends with it."""
    numbers = count()

    def encoded(event: Event) -> bytes:
        content = msgspec.json.encode({**event, "sequence_number": next(numbers)})
        return f"event: {event['type']}\ndata: ".encode() + content + b"\n\n"

    try:
        for kind in ("created", "in_progress"):
            yield encoded({"type": f"response.{kind}", "response": response.begun()})
        async for _, pieces in running.pieces():
            progress = response.reported.progress(pieces)
            for event in response.output.add(response.text.parts(progress.text), progress.logprobs or ()):
                yield encoded(event)
        completion = running.completions[0]
        for event in response.finish(completion):
            yield encoded(event)
        whole = response.whole(running, completion)
        yield encoded({"type": f"response.{whole['status']}", "response": whole})
    finally:
        running.close()
