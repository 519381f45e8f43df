"""Signatures: functions read from Python source, formatted as in the questions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
