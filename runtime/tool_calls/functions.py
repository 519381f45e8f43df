"""The functions that a chat request offers to the model, and how the model writes calls of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.text.messages import characters_of, shown

FormatName = Literal["hermes", "llama3", "mistral", "json"]
_MOST_FUNCTIONS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORD = re.compile(r"\btools\b")
_MOST_CALLS = 16  # of one text: a weak model would go on until its limit


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls; each is a JSON object with the name of the function and its arguments."""

    name: FormatName
    opening: str  # before the calls; empty: they are the whole text
    closing: str = ""  # after the calls
    arguments: Literal["arguments", "parameters"] = "arguments"  # member of the object with the arguments
    starts: tuple[str, ...] = ("",)  # what a generated text may have before its first call, opening excluded
    between: str = ""  # what a generated text has between two calls
    end: str = ""  # what a generated text has after its last call
    prefix: str = ""  # what a text may have before its first call if `opening` is empty
    short_ids: bool = False  # whether templates expect ids of calls with nine characters


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat(  # also Qwen 2.5 and Qwen 3
        "hermes",
        "<tool_call>",
        "</tool_call>",
        starts=("\n",),
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    ),
    "llama3": ToolFormat("llama3", "", arguments="parameters", between="; ", prefix="<|python_tag|>"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", starts=("[", " ["), between=", ", end="]", short_ids=True),
    "json": ToolFormat("json", "", starts=("[",), between=", ", end="]"),
}


def format_of(template: str) -> ToolFormat:
    """The format of the calls that a chat template renders; plain JSON if it is none of the known ones."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template and "<function=" not in template:
        return FORMATS["hermes"]
    if "<|start_header_id|>" in template and ("ipython" in template or "<|python_tag|>" in template):
        return FORMATS["llama3"]
    return FORMATS["json"]


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that arguments are generated with: those without properties of their own have none."""
        schema = {"type": "object", "properties": {}, **self.parameters}
        if not {"additionalProperties", "patternProperties", "$ref"} & set(schema):
            schema["additionalProperties"] = False
        return schema


def functions_of(tools: Sequence[Mapping[str, Any]], limits: Limits = DEFAULT_LIMITS) -> tuple[ToolFunction, ...]:
    """The functions in the field `tools` of a request; raises with the path of what is invalid."""
    if len(tools) > _MOST_FUNCTIONS:
        raise OptionFault(f"tools has {len(tools)} functions: expected at most {_MOST_FUNCTIONS}")
    functions: dict[str, ToolFunction] = {}
    for index, tool in enumerate(tools):
        function = _function(f"tools[{index}]", tool, limits)
        if function.name in functions:
            raise OptionFault(f"tools[{index}].function.name is {function.name!r} again: expected different names")
        functions[function.name] = function
    return tuple(functions.values())


def _function(where: str, tool: Any, limits: Limits) -> ToolFunction:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise OptionFault(f'{where} is {_shown(tool)}: expected {{"type": "function", "function": {{"name": …}}}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise OptionFault(f'{where}.function is {_shown(function)}: expected an object such as {{"name": "weather"}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionFault(
            f"{where}.function.name is {_shown(name)}: expected 1 to 64 letters, digits, underscores, dots or dashes"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise OptionFault(f"{where}.function.description is {_shown(description)}: expected text")
    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    _check_schema(f"{where}.function.parameters", parameters, limits)
    return ToolFunction(name, parameters)


def _check_schema(where: str, schema: object, limits: Limits) -> None:
    """Raise unless this is a JSON schema of objects within the limits of grammars."""
    if not isinstance(schema, Mapping):
        raise OptionFault(f"{where} is {_shown(schema)}: expected a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise OptionFault(f'{where}.type is {_shown(schema["type"])}: expected "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(
        isinstance(nested, Mapping | bool) for nested in properties.values()
    ):
        raise OptionFault(f"{where}.properties is {_shown(properties)}: expected a JSON schema for each property")
    level: list[Any] = [schema]
    for _ in range(limits.grammar_depth):
        level = [item for value in level for item in _items(value)]
    if level:
        raise OptionFault(f"{where} has more than {limits.grammar_depth} nested levels: expected a simpler schema")
    if (characters := characters_of(schema)) > limits.grammar_chars:
        raise OptionFault(f"{where} has {characters} characters: expected at most {limits.grammar_chars}")


def _items(value: object) -> list[Any]:
    """What is one level below a value, names included."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


def _shown(value: object) -> str:
    if isinstance(value, str | int | float | bool | None):
        return shown(value)
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "no JSON"


def renders_tools(template: str) -> bool:
    """Whether a chat template has anything to do with tools."""
    return _WORD.search(template) is not None


def with_description(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[Mapping[str, Any]]:
    """Messages whose system message describes the functions and how to call them."""
    text = _description(tools, tool_format)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    call = f'{{"name": "NAME", "{tool_format.arguments}": {{ARGUMENTS}}}}'
    example = f"{tool_format.opening}{tool_format.starts[0]}{call}{tool_format.end}"
    return (
        f"You can call these functions, which are described by JSON schemas:\n{functions}\n\n"
        f"To call functions, answer with nothing but:\n{example}"
    )


def calls_grammar(
    tool_format: ToolFormat,
    functions: Sequence[ToolFunction],
    *,
    parallel: bool,
    opened: bool,
    whitespace: bool = False,
) -> Grammar:
    """A grammar for one call of one of these functions, or with `parallel` for several.

    `opened` is whether the prompt ends with the opening of the format, `whitespace` whether arguments may have some.
    """
    opening = "" if opened else tool_format.opening
    starts = " | ".join(json.dumps(opening + start) for start in tool_format.starts)
    more = f"({json.dumps(tool_format.between)} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
    end = json.dumps(tool_format.end) if tool_format.end else ""
    heads = [f'{{"name": {json.dumps(function.name)}, "{tool_format.arguments}": ' for function in functions]
    calls = " | ".join(f'{json.dumps(head)} arguments{index} "}}"' for index, head in enumerate(heads))
    rules = f"start: begin call {more} {end}\nbegin: {starts}\ncall: {calls}"
    return Grammar(
        lark=rules,
        schemas={f"arguments{index}": function.schema for index, function in enumerate(functions)},
        json_whitespace=whitespace,
        name="the grammar of tools",
    )
