"""Chat: renders messages with the model's chat template, in a sandbox."""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from time import thread_time
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation import CPU_SECONDS, DeadlinePassed, HelperPool, JobFailed
from spaceport.runtime.text.chat_prompt import Message as Message
from spaceport.runtime.text.content_parts import reads_parts
from spaceport.runtime.text.prompt_size import characters_of
from spaceport.runtime.text.template_check import is_harmless
from spaceport.runtime.text.tool_messages import compares_content, joins_arguments, with_contents

# Nested loops could hang the caller or fill the memory: the sandbox limits each range, these limit all loops together.
_MOST_ADDED = 256 << 10  # characters of a rendered text beyond those of the messages
_MOST_ROUNDS = 1_000_000
_TIMED = 256  # iterations of all loops between two looks at the clock
_PREFIX = "chat template: "
_MOST_SHOWN = 100  # characters of a message in an error message

_ROLE = re.compile(r"[a-z_]+")
ROLES = ("system", "developer", "user", "assistant", "tool")


class TemplateError(OptionFault):
    """The chat template cannot render the messages, or the bundle has none."""


class _Generation(jinja2.ext.Extension):
    """The `generation` tag around assistant text, which matters in training only: renders its body."""

    tags = {"generation"}  # noqa: RUF012  (as declared by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A chat template, ready to render messages; safe to use from several OS threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], helper: HelperPool | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._helper = helper  # renders templates that may take long; None: they are rendered here
        self._rounds = threading.local()
        with _template_errors():
            parsed = _environment(self._counted).parse(source)
            self.harmless = is_harmless(parsed)
            self.reads_parts = reads_parts(parsed)
            self.joins_arguments = joins_arguments(parsed)
            self._compares_content = compares_content(parsed)
            named = (one.value for one in parsed.find_all(nodes.Const) if isinstance(one.value, str))
            self.roles = frozenset({*ROLES, *(text for text in named if _ROLE.fullmatch(text))})

    @property
    def isolates(self) -> bool:
        """Whether it is rendered in a helper process."""
        return self._helper is not None and not self.harmless

    def render(
        self,
        messages: Sequence[Message],
        ask: bool = True,
        deadline: float | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of these messages; with `ask`, up to where the assistant starts to answer.

        `variables` are those of the template beside the messages, such as tools, as plain data.
        """
        if self.harmless or self._helper is None:
            return self.render_here(messages, ask, variables)
        job = {"messages": plain_messages(messages), "ask": ask, "variables": variables}
        try:
            text = self._helper.run("render", deadline, source=self._source, special_tokens=self._special_tokens, **job)
        except DeadlinePassed:
            raise
        except JobFailed as error:
            message = str(error)
            raise TemplateError(message if message.startswith(_PREFIX) else f"{_PREFIX}{message}") from error
        return str(text)

    def render_here(
        self, messages: Sequence[Message], ask: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The text of these messages, rendered in this process."""
        plain = plain_messages(messages)
        given = {
            **self._special_tokens,
            "messages": with_contents(plain) if self._compares_content else plain,
            "tools": None,  # as in transformers: many templates test whether tools are none
            "documents": None,
            **(variables or {}),
            "add_generation_prompt": ask,
        }
        self._rounds.count, self._rounds.end = 0, thread_time() + CPU_SECONDS
        with _template_errors():
            return _joined(self._compiled.generate(given), _MOST_ADDED + characters_of([plain, variables]))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The template with counted loops; compiling it computes its constant expressions, which may take long."""
        environment = _environment(self._counted)
        parsed = environment.parse(self._source)
        for loop in list(parsed.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        parsed.set_environment(environment)
        return environment.from_string(parsed)

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raise for roles that are neither common nor named by the template."""
        for number, message in enumerate(messages):
            if message["role"] not in self.roles:
                raise TemplateError(
                    f"message {number} has the role {_shown(message['role'])}: expected {', '.join(ROLES)}, or another "
                    "role that the chat template names"
                )

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """A filter that counts the iterations of all loops of a rendering."""
        for item in items:
            self._rounds.count += 1
            if self._rounds.count > _MOST_ROUNDS:
                raise TemplateError(f"chat template: its loops have more than {_MOST_ROUNDS} iterations")
            if not self._rounds.count % _TIMED and thread_time() > self._rounds.end:
                raise TemplateError(f"chat template: took more than {CPU_SECONDS:g} s")
            yield item


def open_template(bundle: Bundle, helper: HelperPool | None = None) -> ChatTemplate:
    """The chat template of a bundle; with a helper process, it renders templates that may take long."""
    if TEMPLATE_FILE not in bundle.manifest.files:
        raise TemplateError(
            f"{bundle.path}: the checkpoint had no chat template: give a plain prompt instead of messages"
        )
    try:
        source = bundle.read(TEMPLATE_FILE).decode()
    except (OSError, ValueError) as error:
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error
    return ChatTemplate(source, bundle.manifest.special_tokens, helper)


def render(bundle: Bundle, messages: Sequence[Message], ask: bool = True) -> str:
    """The text of these messages; with `ask`, up to where the assistant starts to answer."""
    return open_template(bundle).render(messages, ask)


def plain_messages(messages: Sequence[Message]) -> list[Any]:
    """A copy of messages as plain data, since a template could call methods of other objects."""
    if not messages:
        raise TemplateError("messages are empty: expected at least one {'role': …, 'content': …}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"message {number} is {_shown(message)}: expected {{'role': …, 'content': …}}")
        if "content" not in message and not message.get("tool_calls"):
            raise TemplateError(
                f"message {number} is {_shown(message)}: expected {{'role': …, 'content': …}}, or 'tool_calls' instead of "
                "the content"
            )
    # None values are left out, as in transformers: many templates would print them or fail.
    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return list(plain_data(said, "messages"))


def plain_data(value: Any, name: str) -> Any:
    """A copy of a value as plain JSON data; `name` is that of the value in errors."""
    try:
        return json.loads(json.dumps(value, default=_as_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"{name}: {error}: expected JSON values") from error


def _as_plain(value: object) -> Any:
    """A mapping that is no dictionary as one, such as a frozen tool."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _joined(pieces: Iterable[str], most: int) -> str:
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > most:
            raise TemplateError(f"chat template: rendered more than {most} characters")
    return "".join(found)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raises any error of a template as `TemplateError`, since a template is a program and may raise anything."""
    try:
        yield
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _environment(counted: Callable[[Iterable[Any]], Iterator[Any]]) -> jinja2.Environment:
    """A sandbox with the functions and filters that chat templates expect."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    environment.filters["counted"] = counted
    return environment


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


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
