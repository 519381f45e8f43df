"""Answers: what is asked about a function, the templated answer, and whether a written answer is right."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from spaceport.tools.demo_recipe.signatures import HIDDEN, Function, Parameter, read_signature

FEWEST_ITEMS, MOST_ITEMS = 3, 8  # parameters that are answered with a list; with fewer, a sentence says it all

_ASK = "Explain the parameters of "
_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_COLLECTS = {
    "values": "It collects all further values that are given by position, as a tuple.",
    "names": "It collects all further values that are given by name, as a dictionary.",
}
_ITEM = re.compile(r"(\d+)\. ([^:\n]+): (.*)")


@dataclass(frozen=True)
class AnswerVerdict:
    """How a written answer compares with the signature."""

    expected: int  # items that the answer has to have; 0: it is a sentence
    found: int
    right: tuple[bool, ...]  # for each expected item whether it stands in its place to the letter
    mistakes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not self.mistakes


def question(function: Function) -> str:
    """What a user asks."""
    return _ASK + function.text


def asked(text: str) -> Function:
    """The function that a question is about."""
    return read_signature(text.removeprefix(_ASK))


def answer(function: Function) -> str:
    """The only right answer: a numbered list, or a sentence for fewer than three parameters."""
    parameters = function.parameters
    if len(parameters) < FEWEST_ITEMS:
        return _sentence(function)
    items = (
        f"{number}. {parameter.title}: {detail(parameter, number)}"
        for number, parameter in enumerate(parameters, start=1)
    )
    return "\n".join((_opening(function), *items, "", _closing(function)))


def detail(parameter: Parameter, number: int) -> str:
    """What the signature tells of a parameter; `number` counts from 1."""
    if parameter.kind in _COLLECTS:
        return _COLLECTS[parameter.kind]
    need = "It is required" if parameter.required else "It is optional"
    place = f"as the {_PLACES[number - 1]} value"
    way = {"before": f"only {place}", "plain": f"by name or {place}", "named": "only by name"}[parameter.kind]
    told = f"{need}, and it is given {way}."
    return told if parameter.default is None else f"{told} Its default is {_value(parameter.default)}."


def verify(function: Function, text: str) -> AnswerVerdict:
    """The verdict on a written answer, with every mistake in words."""
    if len(function.parameters) < FEWEST_ITEMS:
        right = answer(function)
        mistakes = [] if text == right else [f"got {text!r}, expected {right!r}"]
        return AnswerVerdict(0, len(_items(text)), (), tuple(mistakes))
    opening, *expected, blank, closing = answer(function).split("\n")
    lines, found = text.split("\n"), _items(text)
    same = tuple(found[place : place + 1] == [line] for place, line in enumerate(expected))
    mistakes = [] if len(found) == len(expected) else [f"{len(found)} items, expected {len(expected)}"]
    for place, line in enumerate(expected[: len(found)]):
        if not same[place]:
            mistakes.append(f"item {place + 1} is {found[place]!r}, expected {line!r}")
    for name, got, right in (("first", lines[0], opening), ("last", lines[-1], closing)):
        if got != right:
            mistakes.append(f"the {name} line is {got!r}, expected {right!r}")
    if not mistakes and lines != [opening, *expected, blank, closing]:
        mistakes.append(
            f"{len(lines)} lines, expected {len(expected) + 3}: the items on lines of their own, then a blank one"
        )
    return AnswerVerdict(len(expected), len(found), same, tuple(mistakes))


def _items(text: str) -> list[str]:
    return [line for line in text.split("\n") if _ITEM.fullmatch(line)]


def _opening(function: Function) -> str:
    return f"These are the parameters of {function.name}:"


def _closing(function: Function) -> str:
    required = sum(parameter.required for parameter in function.parameters)
    count = len(function.parameters)
    told = (
        "none is"
        if not required
        else "all are"
        if required == count
        else "1 is"
        if required == 1
        else f"{required} are"
    )
    return f"Of these {count}, {told} required."


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
    """A default in words: what kind of value it is, and the value."""
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
