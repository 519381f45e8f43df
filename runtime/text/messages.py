"""Chat messages: the options of their rendering, their copies as a chat template expects them, and their size."""

from __future__ import annotations

import json
import math
import reprlib
import secrets
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.infill import InfillPrompt

Message = Mapping[str, Any]

_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_LONG = 1000  # items of a value whose whole repr is made
_MOST_SHOWN = 100  # characters of a message in an error message
_CHARACTERS_PER_TOKEN = 4
_MOST_COUNTED = 65_536  # characters and values of messages


class TemplateError(OptionFault):
    """The chat template cannot render the messages, or the bundle has none."""


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages and how the chat template renders them.

    - `messages`: The messages, each with "role" and "content": text, or a list of {"type": "text", "text": …}.
    - `tools`: JSON schemas of functions that the model may call, as the chat template lists them; default: none.
    - `template_kwargs`: Further variables of the chat template, such as {"enable_thinking": False}; default: none.
    - `add_generation_prompt`: Whether the text ends where the assistant starts to answer; default None: unless the final
      message is continued.
    - `continue_final_message`: Whether the completion continues the last message instead of answering it; default False.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("messages", Sequence, "a list of messages"),
            ("tools", list | tuple, "a list of JSON objects"),
            ("template_kwargs", Mapping, "a dictionary of JSON values"),
            ("add_generation_prompt", bool | None, "True, False or None"),
            ("continue_final_message", bool, "True or False"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, str | bytes):
                raise OptionFault(f"{name} is {value!r:.60}: expected {expected}")
        if not all(isinstance(tool, Mapping) for tool in self.tools):
            raise OptionFault("tools: expected JSON objects, such as {'type': 'function', 'function': {'name': …}}")
        for name in self.template_kwargs:
            if not isinstance(name, str) or name in _FIELDS:
                raise OptionFault(
                    f"template_kwargs names {name!r:.60}: expected another variable of the chat template, or the field of ChatPrompt"
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise OptionFault(
                "add_generation_prompt and continue_final_message are both True: expected one of them, an answer or more of "
                "the final message"
            )

    @property
    def asks(self) -> bool:
        """Whether the rendered text ends where the assistant starts to answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template beside the messages."""
        return {"tools": list(self.tools) or None, **self.template_kwargs}


def shown(value: object, most: int = 60) -> str:
    """A value as an error message quotes it, in at most this many characters."""
    if isinstance(value, str):
        text = repr(value[:most])
    else:
        text = reprlib.repr(value) if isinstance(value, Sized) and len(value) > _LONG else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def characters_of(prompt: object, most: float = math.inf) -> int:
    """Number of characters of all texts of a prompt, counted until there are more than `most`.

    Each other value inside of messages counts as one, and each text as at least one; token ids do not count.
    """
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, InfillPrompt):
        return prompt.characters
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        return 0
    if isinstance(prompt, ChatPrompt):
        prompt = [prompt.messages, prompt.tools, prompt.template_kwargs]
    count, waiting = 0, [prompt]
    while waiting and count <= most:
        value = waiting.pop()
        count += max(1, len(value)) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return count


def estimated_tokens(prompt: object) -> int:
    """About how many tokens a prompt has: a quarter of its characters, or its token ids.

    Messages are counted up to 65,536 characters and values, and their last text as a whole.
    """
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt, tuple):  # a prompt and its continuation
        return sum(map(estimated_tokens, prompt))
    return characters_of(prompt, _MOST_COUNTED) // _CHARACTERS_PER_TOKEN


def plain_messages(messages: Sequence[Message]) -> list[Any]:
    """A copy of messages as plain data, since a template could call methods of other objects."""
    if not messages:
        raise TemplateError("messages are empty: expected at least one {'role': …, 'content': …}")
    for number, message in enumerate(messages):
        expected = "expected {'role': …, 'content': …}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"message {number} is {shown(message, _MOST_SHOWN)}: {expected}")
        if "content" not in message and not message.get("tool_calls"):
            raise TemplateError(
                f"message {number} is {shown(message, _MOST_SHOWN)}: {expected}, or 'tool_calls' instead of the content"
            )
    # None values are left out, as in transformers: many templates would print them or fail.
    values = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return list(plain_data(values, "messages"))


def plain_data(value: Any, name: str) -> Any:
    """A copy of a value as plain JSON data; `name` is that of the value in errors."""
    try:
        return json.loads(json.dumps(value, default=_as_dictionary))
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"{name}: {error}: expected JSON values") from error


def with_joined_parts(messages: Sequence[Any]) -> list[Any]:
    """Messages whose contents are text: text parts are joined by line breaks; raises for other parts."""
    return [
        {**message, "content": _joined_parts(number, message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for number, message in enumerate(messages)
    ]


def with_arguments(messages: Sequence[Any], as_text: bool) -> list[Any]:
    """Messages whose calls have arguments as JSON text, or as objects; text that is no JSON object stays text."""
    return [
        {**message, "tool_calls": _calls(f"message {number}: tool_calls", message["tool_calls"], as_text)}
        if isinstance(message.get("tool_calls"), list)
        else message
        for number, message in enumerate(messages)
    ]


def with_end_mark(messages: Sequence[Any]) -> tuple[list[Any], str]:
    """Messages with a mark at the end of the last one's text, and the mark, which ends with a space."""
    mark = f"\ue000{secrets.randbits(64)} "
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + mark}], mark
    parts = list(content) if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], dict) and isinstance(parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": parts[index]["text"] + mark}
            return [*others, {**last, "content": parts}], mark
    raise OptionFault("continue_final_message: the last message has no text: expected a content to continue")


def cut_at_mark(text: str, mark: str) -> str:
    """A rendered chat up to the mark; if the template removes spaces around contents, without those before the mark."""
    end = text.rfind(mark.rstrip())
    if end < 0:
        raise OptionFault(
            "continue_final_message: the chat template leaves out or changes the text of the last message: expected a "
            "message that it renders as it is, such as one of the assistant"
        )
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()


def _as_dictionary(value: object) -> Any:
    """A mapping that is no dictionary as one, such as a frozen tool."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _joined_parts(number: int, parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise OptionFault(
                f"message {number} has the part {part!r:.80}: expected {{'type': 'text', 'text': …}}, the only kind of parts "
                "that this model takes"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(path: str, calls: Sequence[Any], as_text: bool) -> list[Any]:
    """Calls with converted arguments, which are a member of the call or of its function."""
    converted = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        if not isinstance(call, dict):
            raise OptionFault(f'{where} is {call!r:.60}: expected {{"type": "function", "function": {{"name": …}}}}')
        function = call.get("function")
        if isinstance(function, dict):
            converted.append({**call, "function": _function(function, as_text)})
        else:
            converted.append(_function(call, as_text))
    return converted


def _function(function: dict[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        return {**function, "arguments": _parsed(arguments)}
    if isinstance(arguments, dict) and as_text:
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return function


def _parsed(text: str) -> dict[str, Any] | str:
    """The object of arguments; those that the limit of an answer cut off, or that a model wrote wrong, stay text."""
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
