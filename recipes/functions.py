"""Functions: signatures of Python source, invented ones like them, and the templated answers about their parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from random import Random

FEWEST_ITEMS, MOST_ITEMS = 3, 8  # parameters of a list answer; with fewer the answer is a sentence

_HIDDEN = "..."  # replaces a default value that is not shown
_REFUSED = ("```", "~~~", "$$", "<", ">", "=", "---", "http")  # `spaceport tune` finds no list in answers with these
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_COLLECTS: dict[object, tuple[str, str]] = {
    Parameter.VAR_POSITIONAL: ("position", "a tuple"),
    Parameter.VAR_KEYWORD: ("name", "a dictionary"),
}


class Source(str):
    """Source text of a default value, which a signature shows without quotes."""

    __repr__ = str.__str__


@dataclass(frozen=True)
class Function:
    """A function's name and parameters, without annotations."""

    name: str
    signature: Signature

    @property
    def parameters(self) -> list[Parameter]:
        return list(self.signature.parameters.values())

    @property
    def is_listed(self) -> bool:
        """Whether the answer is a list, which forks once per parameter."""
        return len(self.parameters) >= FEWEST_ITEMS

    @property
    def text(self) -> str:
        """The signature with a space before every word, so that a word has the same tokens everywhere."""
        inside = str(self.signature)[1:-1].replace("=", " = ")
        return f"{self.name}( {inside} )" if inside else f"{self.name}( )"


def functions_in(source: str) -> Iterator[Function]:
    """Functions and methods of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(node.name, Signature(list(_parameters(node.args))))


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    """The parameters as inspect has them, without self and cls; defaults are their source text."""
    positional = [
        *((one.arg, Parameter.POSITIONAL_ONLY) for one in arguments.posonlyargs),
        *((one.arg, Parameter.POSITIONAL_OR_KEYWORD) for one in arguments.args),
    ]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    for (name, kind), default in zip(positional, defaults, strict=True):
        if name not in ("self", "cls"):
            yield Parameter(name, kind, default=_shown(default))
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(one.arg, Parameter.KEYWORD_ONLY, default=_shown(default))
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)


def _shown(default: ast.expr | None) -> object:
    if default is None:
        return Parameter.empty
    text = ast.unparse(default)
    short = len(text) <= 16 and text.isascii() and text.isprintable()
    return Source(text if short and not any(sign in text.lower() for sign in _REFUSED) else _HIDDEN)


def question(function: Function) -> str:
    """The user's question about a function."""
    return f"Explain the parameters of {function.text}"


def answer(function: Function) -> str:
    """The only correct answer: a numbered list, or a sentence for fewer than three parameters."""
    parameters = function.parameters
    if not function.is_listed:
        parts = [f"{_title(one)}, which {_role(one)}" for one in parameters]
        count = ("no parameters", "one parameter, ", "two parameters, ")[len(parts)]
        return f"The function {function.name} has {count}{', and '.join(parts)}."
    items = (f"{number}. {_title(one)}: {_detail(one, number)}" for number, one in enumerate(parameters, start=1))
    required = sum(map(_is_required, parameters))
    counts = {0: "none is", len(parameters): "all are", 1: "1 is"}
    closing = f"Of these {len(parameters)}, {counts.get(required, f'{required} are')} required."
    return "\n".join((f"These are the parameters of {function.name}:", *items, "", closing))


def _title(one: Parameter) -> str:
    return str(one.replace(default=one.empty))  # with the stars of *args and **kwargs


def _is_required(one: Parameter) -> bool:
    return one.default is one.empty and one.kind not in _COLLECTS


def _role(one: Parameter) -> str:
    if one.kind in _COLLECTS:
        return f"collects values given by {_COLLECTS[one.kind][0]}"
    return "is required" if _is_required(one) else "is optional"


def _detail(one: Parameter, number: int) -> str:
    if one.kind in _COLLECTS:
        way, kind = _COLLECTS[one.kind]
        return f"It collects all further values that are given by {way}, as {kind}."
    position = f"as the {_ORDINALS[number - 1]} value"
    ways: dict[object, str] = {Parameter.POSITIONAL_ONLY: f"only {position}", Parameter.KEYWORD_ONLY: "only by name"}
    text = f"It {_role(one)}, and it is given {ways.get(one.kind, f'by name or {position}')}."
    return text if one.default is one.empty else f"{text} Its default is {_value(one.default)}."


def _value(default: str) -> str:
    """A default value with its kind, in words."""
    if default == _HIDDEN:
        return "not shown"
    node = ast.parse(default, mode="eval").body
    signed = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(signed, ast.Constant):
        kind = {bool: "flag", str: "string", bytes: "byte string"}.get(type(signed.value), "number")
        return default if signed.value is None else f"the {kind} {default}"
    kinds = {ast.Name: "name", ast.Attribute: "name", ast.Tuple: "tuple", ast.List: "list", ast.Dict: "dictionary"}
    return f"the {kinds.get(type(node), 'expression')} {default}"


def invented(functions: Sequence[Function], dice: Random) -> Iterator[Function]:
    """Endless functions that are answered with a list: parameters of a real one with other names and defaults."""
    every = [one for function in functions for one in function.parameters if one.kind not in _COLLECTS]
    names = list(dict.fromkeys(one.name for one in every))
    defaults = list(dict.fromkeys(one.default for one in every if one.default is not one.empty))
    counts = range(FEWEST_ITEMS, MOST_ITEMS + 1)
    groups = [group for count in counts if (group := [one for one in functions if len(one.parameters) == count])]

    def renamed(one: Parameter) -> Parameter:
        if one.kind in _COLLECTS:
            return one
        name = dice.choice(names)
        if dice.random() < 0.3:  # a name that is in no file
            name = f"{name.strip('_').split('_')[0]}_{dice.choice(names).split('_')[-1]}"
        default = str(dice.randrange(1000)) if dice.random() < 0.1 else dice.choice(defaults)
        return one.replace(name=name, default=one.empty if _is_required(one) else Source(default))

    while True:
        parameters = [renamed(one) for one in dice.choice(dice.choice(groups)).parameters]
        if len({one.name for one in parameters}) == len(parameters):
            yield Function(dice.choice(functions).name, Signature(parameters))
