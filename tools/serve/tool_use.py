"""Tool use: which functions the answer to a chat request may or must call, and how its model writes calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.tool_calls.functions import FORMATS, ToolFormat, ToolFunction, calls_grammar, functions_of
from spaceport.runtime.tool_calls.parser import MOST_CALLS, ToolCallParser
from spaceport.tools.serve.bodies import ChatBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.service import ServedModel

_CHOICES = ("none", "auto", "required")
_EXPECTED = f'{", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": …}}}}'
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """How the answer to a chat request uses tools; without functions, its text has no calls."""

    tool_format: ToolFormat
    functions: tuple[ToolFunction, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # as the chat template renders them
    grammar: Grammar | None = None  # of an answer that has to call functions
    parallel: bool = True
    opening: int | None = None  # token that opens calls, if it is a special one

    @property
    def enforced(self) -> bool:
        """Whether the answer has to consist of calls."""
        return self.grammar is not None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether calls can be found only if the text shows special tokens."""
        return bool(self.functions) and self.opening is not None

    def parser(self) -> ToolCallParser | None:
        """A parser for one choice; None: its text is content."""
        if not self.functions:
            return None
        return ToolCallParser(
            self.tool_format,
            [one.name for one in self.functions],
            most_calls=MOST_CALLS if self.parallel else 1,
            constrained=self.enforced,
            opened=self.enforced and self.opening is not None,
        )

    def call_id(self) -> str:
        """The id of a new call."""
        if self.tool_format.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


NO_TOOLS = ToolUse(FORMATS["json"])


def tool_use_of(body: ChatBody, model: ServedModel, options: ServiceOptions) -> ToolUse:
    """How the answer to a request uses tools; raises if the fields about tools are invalid."""
    tools = body.tools or []
    try:
        functions = functions_of(tools, model.runtime.limits)
    except OptionFault as error:
        raise Failure(400, str(error), param="tools") from error
    called = _called(body.tool_choice, functions)
    if called is None:
        return NO_TOOLS
    tool_format = model.tool_format if options.tool_format is None else FORMATS[options.tool_format]
    opening, parallel = _special_token(model, tool_format.opening), body.parallel_tool_calls is not False
    if not called:
        return ToolUse(tool_format, functions, tools, None, parallel, opening)
    several = parallel and not isinstance(body.tool_choice, dict)
    grammar = calls_grammar(tool_format, called, parallel=several, opened=opening is not None)
    try:
        model.runtime.limits.check_grammar(grammar)
    except OptionFault as error:
        raise Failure(400, str(error), param="tools") from error
    return ToolUse(tool_format, called, tools, grammar, parallel, opening)


def _called(choice: object, functions: tuple[ToolFunction, ...]) -> tuple[ToolFunction, ...] | None:
    """The functions of which the answer has to call some; empty: it may call any; None: it may call none."""
    if choice is None or choice == "auto":
        return () if functions else None
    if choice == "none":
        return None
    name = _named(choice)
    if not functions:
        raise Failure(
            400, f"tool_choice is {_shown(choice)} without tools: expected tools to call", param="tool_choice"
        )
    if name is None:
        return functions
    found = tuple(one for one in functions if one.name == name)
    if not found:
        known = ", ".join(one.name for one in functions[:5])
        raise Failure(400, f"tool_choice names {name!r:.80}: expected one of tools: {known}", param="tool_choice")
    return found


def _named(choice: object) -> str | None:
    """The function that has to be called; None: any."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise Failure(400, f"tool_choice is {_shown(choice)}: expected {_EXPECTED}", param="tool_choice")
    return name


def _special_token(model: ServedModel, text: str) -> int | None:
    """The id of a special token with this text; None: there is none."""
    added = model.runtime.tokenizer.get_added_tokens_decoder() if text else {}
    return next((token for token, entry in added.items() if entry.special and entry.content == text), None)


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str) else "an object"
