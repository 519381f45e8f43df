"""Content parts: message contents that are lists of parts, for chat templates that expect text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

from spaceport.graphs.contract.faults import OptionFault

_CONTENT = "content"


def reads_parts(template: nodes.Template) -> bool:
    """Whether a chat template iterates over the parts of a content; otherwise it expects text."""
    named = {_CONTENT}  # the parameter of a macro
    for assigned in template.find_all(nodes.Assign):
        if _is_content(assigned.node, named) and isinstance(assigned.target, nodes.Name):
            named.add(assigned.target.name)
    return any(_is_content(loop.iter, named) for loop in template.find_all(nodes.For))


def with_joined_parts(messages: Sequence[Any]) -> list[Any]:
    """Messages whose contents are text: text parts are joined by line breaks; raises for other parts."""
    return [
        {**message, _CONTENT: _joined(number, message[_CONTENT])}
        if isinstance(message.get(_CONTENT), list)
        else message
        for number, message in enumerate(messages)
    ]


def _joined(number: int, parts: Sequence[Any]) -> str:
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


def _is_content(node: nodes.Node, named: set[str]) -> bool:
    """Whether an expression is the content of a message, possibly filtered, or a variable with it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == _CONTENT
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    return isinstance(node, nodes.Name) and node.name in named
