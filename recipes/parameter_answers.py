"""Parameter answers: questions about functions, their templated answers, and the verification of a model's answer."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from recipes.signatures import HIDDEN, Function, Parameter, read_signature

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
