"""Chat messages: the body of a request, its tools and prompt, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.tool_calls.functions import (
    FORMATS,
    ToolFunction,
    calls_grammar,
    functions_of,
    renders_tools,
    with_description,
)
from spaceport.serving.answers import ChoicesAnswer, logprobs_of, text_of
from spaceport.serving.bodies import MOST_MESSAGES, GenerationBody, check_count, check_least
from spaceport.serving.call import Call, finish_reason, generation_body
from spaceport.serving.failures import Failure, invalid
from spaceport.serving.options import ServiceOptions
from spaceport.serving.service import ServedModel
from spaceport.serving.tool_use import NO_TOOLS, MessageText, ToolUse

_CHOICES = ("none", "auto", "required")
_EXPECTED = f'{", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": …}}}}'


class SchemaFormat(Struct):
    """A JSON schema that the answer conforms to."""

    schema: dict[str, Any] = {}
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | None = None  # of a json_object, as llama.cpp's server has it


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str) else "an object"


def _called(choice: object, functions: tuple[ToolFunction, ...]) -> tuple[ToolFunction, ...] | None:
    """The functions of which the answer has to call some; empty: it may call any; None: it may call none."""
    if choice is None or choice == "auto":
        return () if functions else None
    if choice == "none":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise invalid("tool_choice", f"is {_shown(choice)}: expected {_EXPECTED}")
    if not functions:
        raise invalid("tool_choice", f"is {_shown(choice)} without tools: expected tools to call")
    called = tuple(function for function in functions if name in (None, function.name))
    if not called:
        known = ", ".join(function.name for function in functions[:5])
        raise invalid("tool_choice", f"names {name!r:.80}: expected one of tools: {known}")
    return called


def _special_token(model: ServedModel, text: str) -> int | None:
    """The id of a special token with this text; None: there is none."""
    added = model.runtime.tokenizer.get_added_tokens_decoder() if text else {}
    return next((token for token, entry in added.items() if entry.special and entry.content == text), None)


class ChatBody(GenerationBody, kw_only=True):
    """A chat request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def most_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        check_least("max_completion_tokens", self.max_completion_tokens)
        return self.max_completion_tokens

    def top_tokens(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "without logprobs: set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def formats(self) -> list[Grammar]:
        """The grammar of JSON, if the answer has to be JSON."""
        form = self.response_format
        if form is None:
            return []
        if form.schema is not None and form.type != "json_object":
            raise invalid("response_format", f"has a schema with the type {form.type}: expected json_object")
        if form.type == "text":
            return []
        if form.type == "json_object":
            schema = {"type": "object"} if form.schema is None else form.schema
        elif form.json_schema is None:
            expected = '{"type": "json_schema", "json_schema": {"schema": …}}'
            raise invalid("response_format", f"has no json_schema: expected {expected}")
        else:
            schema = form.json_schema.schema
        return [Grammar(json_schema=schema, json_whitespace=self.json_whitespace)]

    def tool_use(self, model: ServedModel, options: ServiceOptions) -> ToolUse:
        tools, limits = self.tools or [], model.runtime.limits
        try:
            functions = functions_of(tools, limits)
            called = _called(self.tool_choice, functions)
            if called is None:
                return NO_TOOLS
            tool_format = model.tool_format if options.tool_format is None else FORMATS[options.tool_format]
            opening, parallel = _special_token(model, tool_format.opening), self.parallel_tool_calls is not False
            if not called:
                return ToolUse(tool_format, functions, tools, None, parallel, opening, model.name)
            several = parallel and not isinstance(self.tool_choice, dict)
            grammar = calls_grammar(
                tool_format, called, parallel=several, opened=opening is not None, whitespace=self.json_whitespace
            )
            limits.check_grammar(grammar)
        except OptionFault as error:
            raise Failure(400, str(error), param="tools") from error
        return ToolUse(tool_format, called, tools, grammar, parallel, opening, model.name)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise for messages that are none, too many, or not text."""
    if not messages:
        raise invalid("messages", "is empty: expected at least one message")
    check_count("messages", messages)
    for parts in (message.get("content") for message in messages):
        if not isinstance(parts, list):
            continue
        if len(parts) > MOST_MESSAGES:
            fault = f"a message has {len(parts)} parts: expected at most {MOST_MESSAGES}"
            raise Failure(400, fault, param="messages")
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise Failure(400, "a message has a part that is not text: the models read text only", param="messages")


async def chat_prompt(body: ChatBody, call: Call) -> Prompt:
    """The prompt of a chat request; one whose answer has to consist of calls may end with the token that opens them."""
    tools, model = call.tools, call.model
    check_messages(body.messages)
    messages: Sequence[Mapping[str, Any]] = body.messages
    if tools.tools and not renders_tools(model.chat_template):
        messages = with_description(messages, tools.tools, tools.tool_format)
    prompt = ChatPrompt(
        messages,
        tools=list(tools.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if not tools.enforced or tools.opening is None:
        return prompt
    return [*await asyncio.to_thread(model.runtime.tokens_of, prompt), tools.opening]


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat answer has them."""
    return {
        "content": [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in logprobs]
    }


@dataclass
class ChatAnswer(ChoicesAnswer):
    """An answer of the chat endpoint."""

    texts: dict[int, MessageText] = field(default_factory=dict)  # of each streamed choice

    prefix, whole_kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = MessageText(self.call.tools)
        return {
            "index": index,
            "message": text.message(completion.text),
            "logprobs": chat_logprobs(completion.logprobs) if self.has_logprobs else None,
            "finish_reason": finish_reason(completion.ending, text.has_calls),
            "spaceport": self.report(completion),
        }

    def opening(self, index: int) -> dict[str, Any]:
        self.texts[index] = MessageText(self.call.tools)
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, index: int, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any] | None:
        text, extras = self.texts[index], self.extras(pieces, steps)
        delta = text.delta(text.parts(text_of(pieces)))
        logprobs = logprobs_of(pieces) if self.has_logprobs else []
        if not (delta or logprobs or extras):
            return None
        choice: dict[str, Any] = {"index": index, "delta": delta or {"content": ""}, "finish_reason": None}
        if self.has_logprobs:
            choice["logprobs"] = chat_logprobs(logprobs)
        return choice | extras

    def rest(self, index: int) -> dict[str, Any] | None:
        text = self.texts[index]
        delta = text.delta(text.last_parts())
        return {"index": index, "delta": delta, "finish_reason": None} if delta else None

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        reason = finish_reason(completion.ending, self.texts[index].has_calls)
        return {"index": index, "delta": {}, "finish_reason": reason, "spaceport": self.report(completion)}


async def chat(request: Request) -> Any:
    """Answer chat messages."""
    body = await generation_body(request, ChatBody)
    call = Call.of(request, body)
    return await ChatAnswer(call).respond([await chat_prompt(body, call)])
