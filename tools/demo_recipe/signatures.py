"""Signature: a function's name and parameters, read out of Python source and written as a question shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

LONGEST_DEFAULT = 16  # characters of a default that is shown
HIDDEN = "..."  # stands for a default that is not shown

# What the extractors of a paragraph tree refuse in an answer, and so may not come from a default.
_REFUSED = ("```", "~~~", "$$", "<", ">", "=", "---", "http")

# "before": only by position; "plain": by position or by name; "named": only by name; "values" and "names" collect.
ParameterKind = Literal["before", "plain", "values", "named", "names"]


@dataclass(frozen=True)
class Parameter:
    """One parameter; annotations are left out, the standard library has next to none."""

    name: str
    kind: ParameterKind
    default: str | None = None  # as it is shown; nothing: there is none

    @property
    def title(self) -> str:
        """The name with the stars of a parameter that collects."""
        return {"values": "*", "names": "**"}.get(self.kind, "") + self.name

    @property
    def required(self) -> bool:
        return self.default is None and self.kind not in ("values", "names")


@dataclass(frozen=True)
class Function:
    """A function as its signature tells it."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def text(self) -> str:
        """The signature with a space before every word, so that a word has the same tokens wherever it stands."""
        return f"{self.name}( {', '.join(_marked(self.parameters))} )" if self.parameters else f"{self.name}( )"


def functions_in(source: str) -> Iterator[Function]:
    """The functions and methods of a module in the order of its source; a method's self is no parameter of it."""
    yield from _functions(ast.parse(source), False)


def read_signature(text: str) -> Function:
    """The function that a text such as `f( a, b = 1 )` shows; a SyntaxError if it shows none."""
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
    told = node.args
    places = [*((arg, "before") for arg in told.posonlyargs), *((arg, "plain") for arg in told.args)]
    defaults = [*[None] * (len(places) - len(told.defaults)), *told.defaults]
    found = [
        Parameter(arg.arg, "before" if kind == "before" else "plain", _shown(default))
        for (arg, kind), default in zip(places, defaults, strict=True)
    ]
    if bound:
        del found[:1]
    if told.vararg:
        found.append(Parameter(told.vararg.arg, "values"))
    for arg, default in zip(told.kwonlyargs, told.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "named", _shown(default)))
    if told.kwarg:
        found.append(Parameter(told.kwarg.arg, "names"))
    return Function(node.name, tuple(found))


def _shown(default: ast.expr | None) -> str | None:
    if default is None:
        return None
    text = ast.unparse(default)
    short = len(text) <= LONGEST_DEFAULT and text.isascii() and text.isprintable()
    return text if short and not any(sign in text.lower() for sign in _REFUSED) else HIDDEN


def _marked(parameters: tuple[Parameter, ...]) -> Iterator[str]:
    """Every parameter as it is written, with the `/` and the bare `*` between them."""
    before: ParameterKind | None = None  # the kind of the parameter before
    for parameter in parameters:
        if before == "before" and parameter.kind != "before":
            yield "/"
        if parameter.kind == "named" and before not in ("named", "values"):
            yield "*"
        yield parameter.title if parameter.default is None else f"{parameter.title} = {parameter.default}"
        before = parameter.kind
    if before == "before":
        yield "/"
