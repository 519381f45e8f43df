"""Parameter answers: questions and answers follow the signature, and every mistake is described."""

from __future__ import annotations

import re

import pytest

from spaceport.tools.demo_recipe.parameter_answers import answer, asked, question, verify
from spaceport.tools.demo_recipe.signatures import Function, functions_in
from spaceport.tools.tune.extract import Refusal, extract

pytestmark = pytest.mark.on_change()

EVERY_KIND = 'def every(a, b=1.5, /, c=None, d="x", *rest, e, f=-2, **more): ...'
QUESTION = "Explain the parameters of every( a, b = 1.5, /, c = None, d = 'x', *rest, e, f = -2, **more )"
ANSWER = """\
These are the parameters of every:
1. a: It is required, and it is given only as the first value.
2. b: It is optional, and it is given only as the second value. Its default is the number 1.5.
3. c: It is optional, and it is given by name or as the third value. Its default is None.
4. d: It is optional, and it is given by name or as the fourth value. Its default is the string 'x'.
5. *rest: It collects all further values that are given by position, as a tuple.
6. e: It is required, and it is given only by name.
7. f: It is optional, and it is given only by name. Its default is the number -2.
8. **more: It collects all further values that are given by name, as a dictionary.

Of these 8, 2 are required."""


def one(source: str) -> Function:
    (function,) = functions_in(source)
    return function


def test_question_and_answer_cover_every_parameter_kind() -> None:
    function = one(EVERY_KIND)
    assert question(function) == QUESTION
    assert answer(function) == ANSWER
    assert asked(QUESTION) == function
    verdict = verify(function, ANSWER)
    assert (verdict.exact, verdict.expected, verdict.found, verdict.correct) == (True, 8, 8, (True,) * 8)


def test_fewer_than_three_parameters_are_answered_with_a_sentence() -> None:
    for source, sentence in (
        ("def f(): ...", "has no parameters."),
        ("async def f(*, a=0): ...", "has one parameter, a, which is optional."),
        ("def f(a, b=1, /): ...", "has two parameters, a, which is required, and b, which is optional."),
    ):
        function = one(source)
        assert answer(function) == f"The function f {sentence}"
        assert isinstance(extract(answer(function)), Refusal)
        assert verify(function, answer(function)).exact
        verdict = verify(function, "1. a: It is required.")
        assert (verdict.expected, verdict.found, verdict.exact) == (0, 1, False)
        assert f"expected 'The function f {sentence}" in verdict.mistakes[0]


def test_a_default_is_described_with_its_kind_or_hidden() -> None:
    shown = {"True": "flag True", "-1j": "number -1j", "b''": "byte string b''", "()": "tuple ()", "[]": "list []"}
    shown |= {"{1: 2}": "dictionary {1: 2}", "os.sep": "name os.sep", "1 + 2": "expression 1 + 2"}
    for default in (*shown, "'a longer string'", "'<a>'", "f(a=1)", "'HTTP'", "'ä'", "..."):
        function = one(f"def f(a, b, c={default}): ...")
        described = f"the {shown[default]}" if default in shown else "not shown"
        assert answer(function).split("\n")[3].endswith(f" Its default is {described}.")
        assert function.text == f"f( a, b, c = {default if default in shown else '...'} )"
        assert asked(question(function)) == function


def test_the_last_line_counts_the_required_parameters() -> None:
    closings = {"a, b, c": "3, all are", "a, *b, **c": "3, 1 is", "a=1, b=2, *, c=3, d=4": "4, none is"}
    for parameters, closing in closings.items():
        assert answer(one(f"def f({parameters}): ...")).split("\n")[-2:] == ["", f"Of these {closing} required."]


def test_self_is_not_a_parameter() -> None:
    source = """\
class A:
    def method(self, a):
        def inside(b): ...
    @staticmethod
    def static(d): ...
    if True:
        def conditional(self, f): ...
"""
    assert [function.text.partition("(")[2] for function in functions_in(source)] == [" a )", " b )", " d )", " f )"]


LAST = "\n8. **more: It collects all further values that are given by name, as a dictionary."


@pytest.mark.parametrize(
    ("old", "new", "found", "wrong", "mistake"),
    [
        ("number 1.5", "number 1.6", 8, {2}, "item 2 is '2. b: .* number 1.6.', expected '2. b: .* number 1.5.'"),
        (LAST, "", 7, {8}, "7 items, expected 8"),
        ("1. a:", "1. b:", 8, {1}, "item 1 is '1. b: "),
        ("7. f", "8. f", 8, {7}, "item 7 is '8. f: "),
        ("of every", "of each", 8, set(), "the first line is 'These are the parameters of each:'"),
        ("2 are", "3 are", 8, set(), "the last line is 'Of these 8, 3 are required.', expected 'Of these 8, 2 "),
        ("\n\n", "\n", 8, set(), "10 lines, expected 11: "),
    ],
)
def test_verify_names_each_mistake(old: str, new: str, found: int, wrong: set[int], mistake: str) -> None:
    assert old in ANSWER
    verdict = verify(one(EVERY_KIND), ANSWER.replace(old, new))
    assert not verdict.exact
    assert (verdict.expected, verdict.found) == (8, found)
    assert {number for number, right in enumerate(verdict.correct, start=1) if not right} == wrong
    (described,) = verdict.mistakes
    assert re.search(mistake, described)


def test_an_item_is_correct_only_at_its_index() -> None:
    opening, first, second, *rest = ANSWER.split("\n")
    verdict = verify(one(EVERY_KIND), "\n".join((opening, second, first, *rest)))
    assert verdict.correct == (False, False, *[True] * 6)
    assert len(verdict.mistakes) == 2
