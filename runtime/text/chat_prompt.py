"""Chat prompt: chat messages with the options of their rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spaceport.graphs.contract.faults import OptionFault

Message = Mapping[str, Any]

_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")


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
