"""Tool messages: earlier messages with calls of functions, as a chat template expects them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

from spaceport.graphs.contract.faults import OptionFault

_ARGUMENTS, _CONTENT = "arguments", "content"


def joins_arguments(template: nodes.Template) -> bool:
    """Whether a chat template joins the arguments of a call with text, so that they have to be JSON text."""
    named: set[str] = set()
    for assigned in template.find_all(nodes.Assign):
        if _is_arguments(assigned.node, named) and isinstance(assigned.target, nodes.Name):
            named.add(assigned.target.name)
    added = [operand for one in template.find_all(nodes.Add) for operand in (one.left, one.right)]
    added += [operand for one in template.find_all(nodes.Concat) for operand in one.nodes]
    return any(_is_arguments(operand, named) for operand in added)


def compares_content(template: nodes.Template) -> bool:
    """Whether a chat template tests if a content is none, so that a message without one has to have none."""
    return any(
        test.name == "none"
        and isinstance(test.node, nodes.Getattr | nodes.Getitem)
        and _CONTENT in (getattr(test.node, "attr", None), getattr(getattr(test.node, "arg", None), "value", None))
        for test in template.find_all(nodes.Test)
    )


def with_contents(messages: Sequence[Any]) -> list[Any]:
    """Messages with a content each, which is none where they have calls only."""
    return [{**message, _CONTENT: message.get(_CONTENT)} for message in messages]


def with_arguments(messages: Sequence[Any], as_text: bool) -> list[Any]:
    """Messages whose calls have arguments as JSON text, or as objects; raises for text that is no JSON object."""
    return [
        {
            **message,
            "tool_calls": [_call(f"message {number}: tool_calls[{index}]", call, as_text) for index, call in calls],
        }
        if (calls := _calls(message))
        else message
        for number, message in enumerate(messages)
    ]


def _calls(message: Any) -> list[tuple[int, Any]]:
    calls = message.get("tool_calls")
    return list(enumerate(calls)) if isinstance(calls, list) else []


def _call(where: str, call: Any, as_text: bool) -> Any:
    if not isinstance(call, dict):
        raise OptionFault(f'{where} is {call!r:.60}: expected {{"type": "function", "function": {{"name": …}}}}')
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _function(f"{where}.function", function, as_text)}
    return _function(where, call, as_text)


def _function(where: str, function: dict[str, Any], as_text: bool) -> dict[str, Any]:
    given = function.get(_ARGUMENTS)
    if isinstance(given, str) and not as_text:
        return {**function, _ARGUMENTS: _parsed(f"{where}.arguments", given)}
    if isinstance(given, dict) and as_text:
        return {**function, _ARGUMENTS: json.dumps(given, ensure_ascii=False)}
    return function


def _parsed(where: str, text: str) -> Any:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise OptionFault(f"{where} is not JSON: {error}: expected the JSON text of an object") from error
    if not isinstance(found, dict):
        raise OptionFault(f"{where} is {text!r:.60}: expected the JSON text of an object")
    return found


def _is_arguments(node: nodes.Node, named: set[str]) -> bool:
    """Whether an expression is the arguments of a call as they were given."""
    if isinstance(node, nodes.Getattr):
        return node.attr == _ARGUMENTS
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == _ARGUMENTS
    return isinstance(node, nodes.Name) and node.name in named
