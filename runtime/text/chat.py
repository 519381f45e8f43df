"""Chat: renders messages with the model's chat template, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import Bundle

# Nested loops could hang the caller or fill the memory: the sandbox limits each range, these limit all loops together.
_LONGEST_PROMPT = 10_000_000  # characters
_MOST_ROUNDS = 1_000_000

Message = Mapping[str, Any]


class TemplateError(OptionFault):
    """The chat template cannot render the messages, or the bundle has none."""


class _Generation(jinja2.ext.Extension):
    """The `generation` tag around assistant text, which matters in training only: renders its body."""

    tags = {"generation"}  # noqa: RUF012  (as declared by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render(bundle: Bundle, messages: Sequence[Message], ask: bool = True) -> str:
    """The text of these messages; with `ask`, up to where the assistant starts to answer."""
    if TEMPLATE_FILE not in bundle.manifest.files:
        raise TemplateError(
            f"{bundle.path}: the checkpoint had no chat template: give a plain prompt instead of messages"
        )
    given = {
        **bundle.manifest.special_tokens,
        "messages": _plain(messages),
        "tools": None,  # as in transformers: many templates test whether tools are none
        "documents": None,
        "add_generation_prompt": ask,
    }
    try:
        return _joined(_template((bundle.path / TEMPLATE_FILE).read_text("utf-8")).generate(given))
    except TemplateError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _plain(messages: Sequence[Message]) -> list[Any]:
    """A copy as plain data, since a template could call methods of other objects."""
    if not messages:
        raise TemplateError("messages are empty: expected at least one {'role': …, 'content': …}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TemplateError(f"message {number} is {message!r}: expected {{'role': …, 'content': …}}")
    # None values are left out, as in transformers: many templates would print them or fail.
    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return list(json.loads(json.dumps(said)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"messages: {error}: expected JSON values") from error


def _joined(pieces: Iterable[str]) -> str:
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > _LONGEST_PROMPT:
            raise TemplateError(f"chat template: rendered more than {_LONGEST_PROMPT} characters")
    return "".join(found)


def _template(source: str) -> jinja2.Template:
    """A template with the functions and filters that chat templates expect, in a sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    environment.filters["counted"] = _counter()
    parsed = environment.parse(source)
    for loop in list(parsed.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
    parsed.set_environment(environment)
    return environment.from_string(parsed)


def _counter() -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A filter that counts the iterations of all loops that use it."""
    rounds = 0

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal rounds
        for item in items:
            rounds += 1
            if rounds > _MOST_ROUNDS:
                raise TemplateError(f"chat template: its loops have more than {_MOST_ROUNDS} iterations")
            yield item

    return counted


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
