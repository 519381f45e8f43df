"""Functions: the functions that a chat request offers to the model, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits

_MOST_FUNCTIONS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_SHOWN = 60  # characters of a value in an error message


@dataclass(frozen=True)
class Function:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that arguments are generated with: those without properties of their own have none."""
        found = {"type": "object", "properties": {}, **self.parameters}
        if not {"additionalProperties", "patternProperties", "$ref"} & set(found):
            found["additionalProperties"] = False
        return found


def functions_of(tools: Sequence[Mapping[str, Any]], limits: Limits = DEFAULT_LIMITS) -> tuple[Function, ...]:
    """The functions in the field `tools` of a request; raises with the path of what is invalid."""
    if len(tools) > _MOST_FUNCTIONS:
        raise OptionFault(f"tools has {len(tools)} functions: expected at most {_MOST_FUNCTIONS}")
    found = tuple(_function(f"tools[{index}]", tool, limits) for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, one in enumerate(found):
        if one.name in names:
            raise OptionFault(f"tools[{index}].function.name is {one.name!r} again: expected different names")
        names.add(one.name)
    return found


def _function(where: str, tool: Any, limits: Limits) -> Function:
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
    return Function(name, parameters)


def _check_schema(where: str, schema: object, limits: Limits) -> None:
    """Raise unless this is a JSON schema of objects within the limits of grammars."""
    if not isinstance(schema, Mapping):
        raise OptionFault(f"{where} is {_shown(schema)}: expected a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise OptionFault(f'{where}.type is {_shown(schema["type"])}: expected "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(one, Mapping | bool) for one in properties.values()):
        raise OptionFault(f"{where}.properties is {_shown(properties)}: expected a JSON schema for each property")
    characters = 0
    level: list[Any] = [schema]
    for _ in range(limits.grammar_depth):
        below: list[Any] = []
        for value in level:
            characters += len(value) if isinstance(value, str) else 1
            if isinstance(value, Mapping):
                below += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                below += value
        level = below
    if level:
        raise OptionFault(f"{where} has more than {limits.grammar_depth} nested levels: expected a simpler schema")
    if characters > limits.grammar_chars:
        raise OptionFault(f"{where} has {characters} characters: expected at most {limits.grammar_chars}")


def _shown(value: object) -> str:
    text = f"{value!r:.{_MOST_SHOWN + 1}}" if isinstance(value, str | int | float | bool | None) else _kind(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _kind(value: object) -> str:
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "no JSON"
