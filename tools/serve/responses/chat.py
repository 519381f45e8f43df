"""Chat: a request to the Responses API as a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spaceport.tools.serve.bodies import ChatBody, GenerationBody, ResponseFormat, SchemaFormat
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.responses.body import ResponsesBody, TextFormat

_TEXTS = ("input_text", "output_text", "text")  # kinds of parts that have text
_LOGPROBS = "message.output_text.logprobs"
_SHARED = frozenset(one.name for one in msgspec.structs.fields(GenerationBody)) - {"stream_options", "max_tokens"}


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


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The chat messages of the instructions and the input."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    items: Sequence[dict[str, Any]] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    if not items:
        raise _invalid("input", "is empty: expected text or at least one item")
    for index, item in enumerate(items):
        _add(found, f"input[{index}]", item)
    return found


def _add(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add an item of the input to the messages before it."""
    kind = item.get("type", "message")
    last = messages[-1] if messages else {}
    if kind == "message":
        role, content = item.get("role"), _text(f"{where}.content", item.get("content"))
        if not isinstance(role, str):
            raise _invalid(f"{where}.role", "is missing: expected user, assistant, system or developer")
        role = "system" if role == "developer" else role
        if role == "system" and [one["role"] for one in messages] == ["system"]:
            last["content"] += f"\n\n{content}"  # templates take one system message, at the start
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "")},
        }
        if not all(isinstance(one, str) for one in (call["id"], item.get("name"), item.get("arguments", ""))):
            raise _invalid(where, "is no function_call: expected call_id, name and arguments as texts")
        if last.get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise _invalid(f"{where}.call_id", "is missing: expected that of a function_call")
        output = _text(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind != "reasoning":  # what a model thought in earlier turns is not rendered
        raise _invalid(
            f"{where}.type", f"is {kind!r:.60}: expected message, function_call, function_call_output or reasoning"
        )


def _text(where: str, content: object) -> str:
    """The text of a content; parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "is missing: expected text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else None
        if isinstance(part, dict) and part.get("type") == "refusal":
            text = part.get("refusal")
        if not isinstance(text, str):
            raise _invalid(f"{where}[{index}]", "is no text: the models read text only")
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


def _format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type == "json_schema":
        if given.schema is None:
            raise Failure(400, "text.format.schema is missing: expected a JSON schema", param="text.format.schema")
        return ResponseFormat("json_schema", SchemaFormat(given.schema, given.name, given.strict))
    return ResponseFormat(given.type)


def _invalid(where: str, what: str) -> Failure:
    return Failure(400, f"{where} {what}", param=where)
