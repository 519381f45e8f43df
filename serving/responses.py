"""The Responses API: a request as a chat request, and its output as items and events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request

from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.tool_calls.parser import CallPart, MessagePart
from spaceport.serving.answers import Answer, logprobs_of, text_of
from spaceport.serving.bodies import GenerationBody, check_count, check_least
from spaceport.serving.call import Call, finish_reason, generation_body
from spaceport.serving.chat import ChatBody, ResponseFormat, SchemaFormat, chat_logprobs, chat_prompt
from spaceport.serving.failures import Failure, invalid
from spaceport.serving.tool_use import MessageText, ToolUse

_STORED = ("previous_response_id", "conversation", "prompt")  # they name what an earlier request has stored
_ADVICE = "the service stores nothing: send all messages as input"
_TEXTS = ("input_text", "output_text", "text", "refusal")  # kinds of parts that have text
_LOGPROBS = "message.output_text.logprobs"
_SHARED = frozenset(entry.name for entry in msgspec.structs.fields(GenerationBody)) - {"stream_options", "max_tokens"}

Event = dict[str, Any]


class TextFormat(Struct):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """A request to the Responses API."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None


def check_fields(body: ResponsesBody) -> None:
    """Raise for fields that need stored responses, and for reports that only the other endpoints have."""
    for name in _STORED:
        if getattr(body, name) is not None:
            raise invalid(name, f"is not supported: {_ADVICE}")
    if body.background:
        raise invalid("background", f"is not supported: {_ADVICE}, or a stream")
    if body.spaceport.threads:
        raise invalid("spaceport.threads", "is not supported here: expected a request for /v1/chat/completions")
    for name in ("max_tokens", "max_output_tokens"):
        if (given := getattr(body, name)) is not None:
            check_least(name, given)
    if body.n not in (None, 1):
        raise invalid("n", f"is {body.n}: expected 1, a response has one output")
    if isinstance(body.input, list):
        check_count("input", body.input)


def _text(where: str, content: object) -> str:
    """The text of a content; parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "is missing: expected text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            raise invalid(f"{where}[{index}]", "is no text: the models read text only")
        texts.append(text)
    return "\n".join(texts)


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function of the Responses API, which has no object of its own, as one of the chat endpoint."""
    if tool.get("type") != "function":
        expected = "expected function: the service calls no tools itself"
        raise Failure(400, f"tools[{index}].type is {tool.get('type')!r:.60}: {expected}", param="tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    if text_format.type == "json_schema":
        if text_format.schema is None:
            raise invalid("text.format.schema", "is missing: expected a JSON schema")
        return ResponseFormat("json_schema", SchemaFormat(text_format.schema))
    return ResponseFormat(text_format.type)


def _add(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add an item of the input to the messages before it."""
    kind = item.get("type", "message")
    last = messages[-1] if messages else {}
    if kind == "message":
        role, content = item.get("role"), _text(f"{where}.content", item.get("content"))
        if not isinstance(role, str):
            raise invalid(f"{where}.role", "is missing: expected user, assistant, system or developer")
        role = "system" if role == "developer" else role
        if role == "system" and [message["role"] for message in messages] == ["system"]:
            last["content"] += f"\n\n{content}"  # templates take one system message, at the start
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "")},
        }
        if not all(isinstance(text, str) for text in (call["id"], item.get("name"), item.get("arguments", ""))):
            raise invalid(where, "is no function_call: expected call_id, name and arguments as texts")
        if last.get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{where}.call_id", "is missing: expected that of a function_call")
        output = _text(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind != "reasoning":  # what a model thought in earlier turns is not rendered
        raise invalid(
            f"{where}.type", f"is {kind!r:.60}: expected message, function_call, function_call_output or reasoning"
        )


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The chat messages of the instructions and the input."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items: Sequence[dict[str, Any]] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    if not items:
        raise invalid("input", "is empty: expected text or at least one item")
    for index, item in enumerate(items):
        _add(messages, f"input[{index}]", item)
    return messages


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request as a chat request."""
    wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    return ChatBody(
        **{name: getattr(body, name) for name in _SHARED},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs,
        response_format=_format(body.text.format if body.text is not None else None),
        tools=None if body.tools is None else [_tool(index, tool) for index, tool in enumerate(body.tools)],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
    )


@dataclass
class OutputItems:
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
        events: list[Event] = []
        for part in parts:
            events += self._add_text(part) if isinstance(part, str) else self._add_call(part)
        return events

    def close(self, complete: bool = True) -> list[Event]:
        """End the last item; `complete` is whether nothing cut it off."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events = [self._event("function_call_arguments.done", item_id=item["id"], name=name, arguments=arguments)]
        else:
            (part,) = item["content"]
            if self.with_logprobs:
                part["logprobs"] += self._logprobs
            events = [
                self._text_event("output_text.done", text=part["text"], logprobs=part.get("logprobs", [])),
                self._text_event("content_part.done", part=part.copy()),
            ]
        return [*events, self._event("output_item.done", item=item.copy())]

    def _add_text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._open or self.items[-1]["type"] != "message":
            events += self._begin("msg", type="message", role="assistant", content=[])
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            if self.with_logprobs:
                part["logprobs"] = []
            self.items[-1]["content"] = [part]
            events.append(self._text_event("content_part.added", part=deepcopy(part)))
        (part,) = self.items[-1]["content"]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        if self.with_logprobs:
            part["logprobs"] += logprobs
        return [*events, self._text_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _add_call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            call = {"call_id": self.tools.call_id(), "name": part.name, "arguments": ""}
            events += self._begin("fc", type="function_call", **call)
        self.items[-1]["arguments"] += part.arguments
        if part.arguments:
            item_id = self.items[-1]["id"]
            events.append(self._event("function_call_arguments.delta", item_id=item_id, delta=part.arguments))
        return events

    def _begin(self, prefix: str, **item: Any) -> list[Event]:
        """End the last item, and begin another one."""
        events = self.close()
        self.items.append({"id": f"{prefix}_{secrets.token_hex(12)}", **item, "status": "in_progress"})
        self._open = True
        return [*events, self._event("output_item.added", item=self.items[-1].copy())]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **fields}

    def _text_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self.items[-1]["id"], content_index=0, **fields)


@dataclass
class ResponsesAnswer(Answer):
    """The response to one request, which grows, and what all its events have in common."""

    asked: ResponsesBody  # the body of the call is the same request as a chat request

    prefix = "resp_"

    def __post_init__(self) -> None:
        self._items = OutputItems(self.call.tools, with_logprobs=self.has_logprobs)
        self._text = MessageText(self.call.tools)

    def _add(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        return self._items.add(self._text.parts(text), logprobs)

    def _finish(self, completion: Completion) -> list[Event]:
        """Add the text that was held back, and end the output."""
        added = self._items.add(self._text.last_parts())
        if not self._items.items:  # a response has at least one item
            added += self._items.add([""])
        return [*added, *self._items.close(finish_reason(completion.ending) == "stop")]

    async def whole(self) -> dict[str, Any]:
        (completion,) = await self.call.whole()
        self._add(completion.text, completion.logprobs)
        self._finish(completion)
        return self._response(completion)

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, numbers = self.call, count()

        def encoded(event: Event) -> bytes:
            content = msgspec.json.encode({**event, "sequence_number": next(numbers)})
            return f"event: {event['type']}\ndata: ".encode() + content + b"\n\n"

        for kind in ("created", "in_progress"):
            begun = {**self._head("in_progress"), "output": [], "usage": None}
            yield encoded({"type": f"response.{kind}", "response": begun})
        async for _, pieces in call.pieces():
            for event in self._add(text_of(pieces), logprobs_of(pieces)):
                yield encoded(event)
        completion = call.completions[0]
        for event in self._finish(completion):
            yield encoded(event)
        finished = self._response(completion)
        yield encoded({"type": f"response.{finished['status']}", "response": finished})

    def _response(self, completion: Completion) -> dict[str, Any]:
        complete = finish_reason(completion.ending) == "stop"
        counts = self.counts
        usage = counts["usage"]
        return {
            **self._head("completed" if complete else "incomplete"),
            "completed_at": int(time.time()),
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": self._items.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": counts["metrics"],
            "spaceport": self.report(completion),
        }

    def _head(self, status: str) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.call.model.name,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.tools or ()],
            "text": {
                "format": {"type": "text"} if asked.text is None or asked.text.format is None else asked.text.format
            },
            "truncation": "disabled",
        }


async def responses(request: Request) -> Any:
    """Answer the input of a request to the Responses API."""
    asked = await generation_body(request, ResponsesBody)
    check_fields(asked)
    body = chat_body(asked)
    call = Call.of(request, body)
    return await ResponsesAnswer(call, asked).respond([await chat_prompt(body, call)])
