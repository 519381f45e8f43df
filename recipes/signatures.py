"""Signatures: functions of Python source, invented ones like them, and the templated answers about their parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

LONGEST_DEFAULT = 16  # characters of a default value that is shown
HIDDEN = "..."  # replaces a default value that is not shown

# Text that the paragraph tree extractors refuse, so default values must not contain it.
_REFUSED = ("```", "~~~", "$$", "<", ">", "=", "---", "http")

# "before": positional only; "plain": positional or keyword; "named": keyword only; "values": *args; "names": **kwargs.
ParameterKind = Literal["before", "plain", "values", "named", "names"]


@dataclass(frozen=True)
class Parameter:
    """One parameter, without its annotation: the standard library has almost none."""

    name: str
    kind: ParameterKind
    default: str | None = None  # as shown; None: no default

    @property
    def title(self) -> str:
        """The name, with the stars of *args or **kwargs."""
        return {"values": "*", "names": "**"}.get(self.kind, "") + self.name

    @property
    def required(self) -> bool:
        return self.default is None and self.kind not in ("values", "names")


@dataclass(frozen=True)
class Function:
    """A function's name and parameters."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def text(self) -> str:
        """The signature with a space before every word, so that a word has the same tokens everywhere."""
        return f"{self.name}( {', '.join(_marked(self.parameters))} )" if self.parameters else f"{self.name}( )"


def functions_in(source: str) -> Iterator[Function]:
    """Functions and methods of a module, in source order; self and cls are left out."""
    yield from _functions(ast.parse(source), False)


def read_signature(text: str) -> Function:
    """Parse a signature such as `f( a, b = 1 )`; raise SyntaxError if it is none."""
    (found,) = ast.parse(f"def {text}: pass").body
    assert isinstance(found, ast.FunctionDef)
    return _function(found, False)


def _functions(node: ast.AST, in_class: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in child.decorator_list)
            yield _function(child, in_class and not static)
            yield from _functions(child, False)
        else:
            yield from _functions(child, in_class or isinstance(child, ast.ClassDef))


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> Function:
    arguments = node.args
    positional = [*((arg, "before") for arg in arguments.posonlyargs), *((arg, "plain") for arg in arguments.args)]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    found = [
        Parameter(arg.arg, "before" if kind == "before" else "plain", _shown(default))
        for (arg, kind), default in zip(positional, defaults, strict=True)
    ]
    if bound:
        del found[:1]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, "values"))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "named", _shown(default)))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, "names"))
    return Function(node.name, tuple(found))


def _shown(default: ast.expr | None) -> str | None:
    if default is None:
        return None
    text = ast.unparse(default)
    short = len(text) <= LONGEST_DEFAULT and text.isascii() and text.isprintable()
    return text if short and not any(sign in text.lower() for sign in _REFUSED) else HIDDEN


def _marked(parameters: tuple[Parameter, ...]) -> Iterator[str]:
    """Every parameter as written in source, with `/` and the bare `*` between them."""
    before: ParameterKind | None = None  # kind of the previous parameter
    for parameter in parameters:
        if before == "before" and parameter.kind != "before":
            yield "/"
        if parameter.kind == "named" and before not in ("named", "values"):
            yield "*"
        yield parameter.title if parameter.default is None else f"{parameter.title} = {parameter.default}"
        before = parameter.kind
    if before == "before":
        yield "/"


FEWEST_ITEMS, MOST_ITEMS = 3, 8  # parameters of a list answer; with fewer the answer is a sentence

_ASK = "Explain the parameters of "
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_COLLECTS = {
    "values": "It collects all further values that are given by position, as a tuple.",
    "names": "It collects all further values that are given by name, as a dictionary.",
}
_ITEM = re.compile(r"(\d+)\. ([^:\n]+): (.*)")


@dataclass(frozen=True)
class AnswerVerdict:
    """Result of comparing an answer with the signature."""

    expected: int  # list items in the correct answer; 0: it is a sentence
    found: int
    correct: tuple[bool, ...]  # per expected item: whether it is at its index, exactly
    mistakes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not self.mistakes


def question(function: Function) -> str:
    """The user's question about a function."""
    return _ASK + function.text


def asked(text: str) -> Function:
    """The function that a question is about."""
    return read_signature(text.removeprefix(_ASK))


def answer(function: Function) -> str:
    """The only correct answer: a numbered list, or a sentence for fewer than three parameters."""
    parameters = function.parameters
    if len(parameters) < FEWEST_ITEMS:
        return _sentence(function)
    items = (
        f"{number}. {parameter.title}: {detail(parameter, number)}"
        for number, parameter in enumerate(parameters, start=1)
    )
    return "\n".join((_opening(function), *items, "", _closing(function)))


def detail(parameter: Parameter, number: int) -> str:
    """Description of a parameter; `number` counts from 1."""
    if parameter.kind in _COLLECTS:
        return _COLLECTS[parameter.kind]
    need = "It is required" if parameter.required else "It is optional"
    position = f"as the {_ORDINALS[number - 1]} value"
    way = {"before": f"only {position}", "plain": f"by name or {position}", "named": "only by name"}[parameter.kind]
    text = f"{need}, and it is given {way}."
    return text if parameter.default is None else f"{text} Its default is {_value(parameter.default)}."


def verify(function: Function, text: str) -> AnswerVerdict:
    """Verify an answer; every mistake is described in words."""
    if len(function.parameters) < FEWEST_ITEMS:
        expected_text = answer(function)
        mistakes = [] if text == expected_text else [f"got {text!r}, expected {expected_text!r}"]
        return AnswerVerdict(0, len(_items(text)), (), tuple(mistakes))
    opening, *expected, blank, closing = answer(function).split("\n")
    lines, found = text.split("\n"), _items(text)
    same = tuple(found[index : index + 1] == [line] for index, line in enumerate(expected))
    mistakes = [] if len(found) == len(expected) else [f"{len(found)} items, expected {len(expected)}"]
    for index, line in enumerate(expected[: len(found)]):
        if not same[index]:
            mistakes.append(f"item {index + 1} is {found[index]!r}, expected {line!r}")
    for name, got, wanted in (("first", lines[0], opening), ("last", lines[-1], closing)):
        if got != wanted:
            mistakes.append(f"the {name} line is {got!r}, expected {wanted!r}")
    if not mistakes and lines != [opening, *expected, blank, closing]:
        mistakes.append(f"{len(lines)} lines, expected {len(expected) + 3}: one line per item, then a blank line")
    return AnswerVerdict(len(expected), len(found), same, tuple(mistakes))


def _items(text: str) -> list[str]:
    return [line for line in text.split("\n") if _ITEM.fullmatch(line)]


def _opening(function: Function) -> str:
    return f"These are the parameters of {function.name}:"


def _closing(function: Function) -> str:
    required = sum(parameter.required for parameter in function.parameters)
    count = len(function.parameters)
    number = (
        "none is"
        if not required
        else "all are"
        if required == count
        else "1 is"
        if required == 1
        else f"{required} are"
    )
    return f"Of these {count}, {number} required."


def _sentence(function: Function) -> str:
    parts = [f"{parameter.title}, which {_role(parameter)}" for parameter in function.parameters]
    if not parts:
        return f"The function {function.name} has no parameters."
    if len(parts) == 1:
        return f"The function {function.name} has one parameter, {parts[0]}."
    return f"The function {function.name} has two parameters, {parts[0]}, and {parts[1]}."


def _role(parameter: Parameter) -> str:
    if parameter.kind == "values":
        return "collects values given by position"
    if parameter.kind == "names":
        return "collects values given by name"
    return "is required" if parameter.required else "is optional"


def _value(default: str) -> str:
    """A default value with its kind, in words."""
    if default == HIDDEN:
        return "not shown"
    node = ast.parse(default, mode="eval").body
    signed = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(signed, ast.Constant):
        if signed.value is None:
            return default
        kind = {bool: "flag", str: "string", bytes: "byte string"}.get(type(signed.value), "number")
        return f"the {kind} {default}"
    kinds = {ast.Name: "name", ast.Attribute: "name", ast.Tuple: "tuple", ast.List: "list", ast.Dict: "dictionary"}
    return f"the {kinds.get(type(node), 'expression')} {default}"


REAL_SHAPES = 0.5  # fraction with the parameter kinds of a real function
REAL_DEFAULTS = 0.6  # fraction of the defaults that stay with their parameter
JOINED_NAMES = 0.3  # fraction of the names that join parts of two names
RANDOM_NUMBERS = 0.1  # fraction of the defaults that are random numbers

_COLLECTORS: tuple[ParameterKind, ParameterKind] = ("values", "names")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Pool:
    """Parts to sample from: no duplicates, in an order that depends only on the functions."""

    names: tuple[str, ...]  # of functions
    parameters: tuple[Parameter, ...]  # without * and ** parameters, by name and default
    collectors: tuple[Parameter, ...]
    defaults: tuple[str, ...]
    shapes: tuple[tuple[Parameter, ...], ...]  # parameters of real functions that are answered with a list


def pool_of(functions: Sequence[Function]) -> Pool:
    """Collect the parts of functions."""
    parameters = [parameter for function in functions for parameter in function.parameters]
    plain = dict.fromkeys(replace(one, kind="plain") for one in parameters if one.kind not in _COLLECTORS)
    return Pool(
        tuple(dict.fromkeys(function.name for function in functions)),
        tuple(plain),
        tuple(dict.fromkeys(one for one in parameters if one.kind in _COLLECTORS)),
        tuple(dict.fromkeys(one.default for one in plain if one.default is not None)),
        tuple(one.parameters for one in functions if FEWEST_ITEMS <= len(one.parameters) <= MOST_ITEMS),
    )


def invent(pool: Pool, rng: np.random.Generator) -> Function:
    """A random function with 3 to 8 parameters, all names different."""
    real = rng.random() < REAL_SHAPES
    shape = [(one.kind, one.required) for one in _pick(pool.shapes, rng)] if real else _shape(rng)
    parameters = [_invented_parameter(pool, kind, required, rng) for kind, required in shape]
    while len({one.name for one in parameters}) < len(parameters):
        parameters = [_invented_parameter(pool, kind, required, rng) for kind, required in shape]
    return Function(_pick(pool.names, rng), tuple(parameters))


def _shape(rng: np.random.Generator) -> list[tuple[ParameterKind, bool]]:
    """Random parameter kinds in valid Python order, each with whether it is required."""
    count = int(rng.integers(FEWEST_ITEMS, MOST_ITEMS + 1))
    values, names = rng.random(2) < 0.15
    own = count - int(values) - int(names)
    named = int(rng.integers(1, own + 1)) if rng.random() < (0.5 if values else 0.15) else 0
    positional = own - named
    before = int(rng.integers(1, positional + 1)) if positional and rng.random() < 0.06 else 0
    required = int(rng.integers(positional + 1))
    shape: list[tuple[ParameterKind, bool]] = [
        ("before" if index < before else "plain", index < required) for index in range(positional)
    ]
    shape += [("values", False)] * int(values)
    shape += [("named", bool(rng.random() < 0.2)) for _ in range(named)]
    return shape + [("names", False)] * int(names)


def _invented_parameter(pool: Pool, kind: ParameterKind, required: bool, rng: np.random.Generator) -> Parameter:
    if kind in _COLLECTORS:
        return replace(_pick([one for one in pool.collectors if one.kind == kind], rng), kind=kind)
    real = _pick(pool.parameters, rng)
    name, default = real.name, real.default
    if rng.random() < JOINED_NAMES:
        parts = [part for part in _pick(pool.parameters, rng).name.split("_") if part]
        name = f"{name.strip('_').split('_')[0]}_{parts[-1]}" if parts else name
    if required:
        return Parameter(name, kind)
    if rng.random() < RANDOM_NUMBERS:
        return Parameter(name, kind, str(rng.integers(10 ** int(rng.integers(1, 4)))))
    if default is None or rng.random() >= REAL_DEFAULTS:
        default = _pick(pool.defaults, rng)
    return Parameter(name, kind, default)


def _pick(items: Sequence[_Item], rng: np.random.Generator) -> _Item:
    return items[int(rng.integers(len(items)))]
