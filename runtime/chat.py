"""Chat: messages to a prompt, through the model's own template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from spaceport.graphs.faults import OptionFault
from spaceport.graphs.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import Bundle

# A template that loops without end would hang the caller: the sandbox bounds ranges, this bounds what it renders.
_LONGEST_PROMPT = 10_000_000

Message = Mapping[str, Any]


class TemplateError(OptionFault):
    """Messages that a chat template cannot render, or no template at all; the message says which."""


class _Generation(jinja2.ext.Extension):
    """The tag around what the assistant says: it matters in training only, here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(bundle: Bundle, messages: Sequence[Message]) -> str:
    """The prompt for these messages, up to where the assistant begins to answer."""
    if TEMPLATE_FILE not in bundle.manifest.files:
        raise TemplateError(
            f"{bundle.path}: the checkpoint had no chat template: give a plain prompt instead of messages"
        )
    _check(messages)
    source = (bundle.path / TEMPLATE_FILE).read_text("utf-8")
    try:
        template = _environment().from_string(source)
        pieces, length = [], 0
        for piece in template.generate(
            messages=list(messages), add_generation_prompt=True, **bundle.manifest.special_tokens
        ):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST_PROMPT:
                raise TemplateError(f"chat template: rendered more than {_LONGEST_PROMPT} characters")
        return "".join(pieces)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise TemplateError("messages are empty: expected at least one {'role': …, 'content': …}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TemplateError(f"message {number} is {message!r}: expected {{'role': …, 'content': …}}")


def _environment() -> jinja2.Environment:
    """Jinja as the templates in the field expect it, without access to anything but what they are given."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    allowed = {name: others.pop(name) for name in ("separators", "sort_keys") if name in others}
    if others:
        raise jinja2.TemplateError(f"tojson takes no {', '.join(sorted(others))}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)
