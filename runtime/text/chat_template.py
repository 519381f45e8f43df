"""Renders chat messages as text, in a sandbox, and in a helper process if it may take long."""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from time import thread_time
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation import CPU_SECONDS, DeadlinePassed, HelperPool, JobFailed
from spaceport.runtime.text.messages import Message, TemplateError, characters_of, plain_messages, shown

# Nested loops could hang the caller or fill the memory: the sandbox limits each range, these limit all loops together.
_MOST_ADDED = 256 << 10  # characters of a rendered text beyond those of the messages
_MOST_ROUNDS = 1_000_000
_TIMED = 256  # iterations of all loops between two looks at the clock
_PREFIX = "chat template: "

_ROLE = re.compile(r"[a-z_]+")
_ROLES = ("system", "developer", "user", "assistant", "tool")

# Statements and expressions whose results are not larger than their operands together. Without macros, and without sums
# in assignments, nothing grows from one iteration of a loop to the next, and loops are counted and timed.
_NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.CondExpr, nodes.Const, nodes.Name),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
    *(nodes.Neg, nodes.Add, nodes.Sub, nodes.Concat, nodes.Mod, nodes.Assign, nodes.NSRef, nodes.Filter, nodes.Test),
    *(nodes.Call, nodes.List, nodes.Dict, nodes.Tuple, nodes.Pair, nodes.Keyword, nodes.Break, nodes.Continue),
    nodes.Scope,
)
_FILTERS = frozenset(
    (
        *("trim", "length", "count", "upper", "lower", "title", "capitalize", "default", "d", "first", "last", "list"),
        *("items", "selectattr", "rejectattr", "tojson"),
    )
)
_FUNCTIONS = frozenset(("raise_exception", "strftime_now", "namespace"))
_METHODS = frozenset(
    (
        *("strip", "lstrip", "rstrip", "split", "startswith", "endswith", "upper", "lower", "title"),
        *("items", "keys", "values", "get"),
    )
)
_DATE = re.compile(r"(%[a-zA-Z%]|[^%]){0,40}")


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
        self._rounds = threading.local()
        with _template_errors():
            parsed = self._environment().parse(source)
            self.harmless = is_harmless(parsed)
            self.reads_parts = reads_parts(parsed)
            self.joins_arguments = joins_arguments(parsed)
            self._compares_content = compares_content(parsed)
            texts = (constant.value for constant in parsed.find_all(nodes.Const) if isinstance(constant.value, str))
            self._roles = frozenset({*_ROLES, *(text for text in texts if _ROLE.fullmatch(text))})
        self._helper = None if self.harmless else helper  # None: it is rendered in this process

    @property
    def isolates(self) -> bool:
        """Whether it is rendered in a helper process."""
        return self._helper is not None

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raise for roles that are neither common nor named by the template."""
        for number, message in enumerate(messages):
            if message["role"] not in self._roles:
                raise TemplateError(
                    f"message {number} has the role {shown(message['role'], 100)}: expected {', '.join(_ROLES)}, or another "
                    "role that the chat template names"
                )

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
        messages = plain_messages(messages)
        if self._helper is None:
            return self._render_here(messages, ask, variables)
        job = {"messages": messages, "ask": ask, "variables": variables}
        try:
            text = self._helper.run("render", deadline, source=self._source, special_tokens=self._special_tokens, **job)
        except DeadlinePassed:
            raise
        except JobFailed as error:
            message = str(error)
            raise TemplateError(message if message.startswith(_PREFIX) else f"{_PREFIX}{message}") from error
        return str(text)

    def _render_here(self, messages: list[Any], ask: bool, variables: Mapping[str, Any] | None) -> str:
        most = _MOST_ADDED + characters_of([messages, variables])
        if self._compares_content:
            messages = [{**message, "content": message.get("content")} for message in messages]
        context = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,  # as in transformers: many templates test whether tools are none
            "documents": None,
            **(variables or {}),
            "add_generation_prompt": ask,
        }
        self._rounds.count, self._rounds.end = 0, thread_time() + CPU_SECONDS
        pieces, length = [], 0
        with _template_errors():
            for piece in self._compiled.generate(context):
                pieces.append(piece)
                length += len(piece)
                if length > most:
                    raise TemplateError(f"chat template: rendered more than {most} characters")
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The template with counted loops; compiling it computes its constant expressions, which may take long."""
        environment = self._environment()
        parsed = environment.parse(self._source)
        for loop in list(parsed.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        parsed.set_environment(environment)
        return environment.from_string(parsed)

    def _environment(self) -> jinja2.Environment:
        """A sandbox with the functions and filters that chat templates expect."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        environment.filters["counted"] = self._counted
        return environment

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


def reads_parts(template: nodes.Template) -> bool:
    """Whether a chat template iterates over the parts of a content; otherwise it expects text."""
    loops = [_unfiltered(loop.iter) for loop in template.find_all(nodes.For)]
    assigned = [(assign.target, _unfiltered(assign.node)) for assign in template.find_all(nodes.Assign)]
    return _any_is_member(loops, "content", assigned, {"content"})  # a name: the parameter of a macro


def joins_arguments(template: nodes.Template) -> bool:
    """Whether a chat template joins the arguments of a call with text, so that they have to be JSON text."""
    operands = [operand for add in template.find_all(nodes.Add) for operand in (add.left, add.right)]
    operands += [operand for concat in template.find_all(nodes.Concat) for operand in concat.nodes]
    assigned = [(assign.target, assign.node) for assign in template.find_all(nodes.Assign)]
    return _any_is_member(operands, "arguments", assigned, set())


def compares_content(template: nodes.Template) -> bool:
    """Whether a chat template tests if a content is none, so that a message without one has to have none."""
    tested = [test.node for test in template.find_all(nodes.Test) if test.name == "none"]
    return _any_is_member(tested, "content", [], set())


def is_harmless(template: nodes.Template) -> bool:
    """Whether rendering takes time and memory in proportion to the messages, or is stopped by the limits of loops."""
    all_nodes = [template, *template.find_all(nodes.Node)]
    assigned = {node.name for node in all_nodes if isinstance(node, nodes.Name) and node.ctx != "load"}
    return not assigned & _FUNCTIONS and all(_is_harmless(node) for node in all_nodes)


def _any_is_member(
    expressions: Iterable[nodes.Node], member: str, assigned: Iterable[tuple[nodes.Node, nodes.Node]], names: set[str]
) -> bool:
    """Whether any of these expressions is a member of this name, or a variable that it is `assigned` to."""
    for target, value in assigned:
        if isinstance(target, nodes.Name) and _is_member(value, member, names):
            names.add(target.name)
    return any(_is_member(expression, member, names) for expression in expressions)


def _is_member(node: nodes.Node, member: str, names: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == member
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == member
    return isinstance(node, nodes.Name) and node.name in names


def _unfiltered(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _is_harmless(node: nodes.Node) -> bool:
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, nodes.For):
        return not node.recursive
    if isinstance(node, nodes.Assign):
        sums = (nodes.Add, nodes.Concat)
        return not isinstance(node.node, sums) and not any(True for _ in node.node.find_all(sums))
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and (node.name != "tojson" or not (node.args or node.kwargs))
    if isinstance(node, nodes.Mod):  # of a text it is formatting, which may need any number of characters
        index = node.left
        return isinstance(index, nodes.Getattr) and index.attr in ("index", "index0") and _is_loop(index.node)
    return not isinstance(node, nodes.Call) or _is_harmless_call(node)


def _is_harmless_call(call: nodes.Call) -> bool:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    if isinstance(call.node, nodes.Getattr):
        return call.node.attr in _METHODS
    if not isinstance(call.node, nodes.Name) or call.node.name not in _FUNCTIONS:
        return False
    if call.node.name != "strftime_now":
        return True
    return (
        len(call.args) == 1 and isinstance(form := call.args[0], nodes.Const) and bool(_DATE.fullmatch(str(form.value)))
    )


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raises any error of a template as `TemplateError`, since a template is a program and may raise anything."""
    try:
        yield
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


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
