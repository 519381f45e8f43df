"""JSON fields: valid values are returned, and errors name the path and follow the rules of the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole


class OddFile(InputFault):
    """An exception type of these tests."""


@dataclass(frozen=True)
class Pair:
    first: int
    second: int


RULES = Rules(OddFile, advice="; write it again", end=1000)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
READERS: dict[str, tuple[Callable[[JsonField], object], Callable[[Any], bool]]] = {
    "whole": (JsonField.whole, lambda value: type(value) is int and 0 <= value < 1000),
    "text": (JsonField.text, lambda value: type(value) is str),
    "boolean": (JsonField.boolean, lambda value: type(value) is bool),
    "object": (JsonField.object, lambda value: type(value) is dict),
    "texts": (JsonField.texts, lambda value: type(value) is dict and all(type(v) is str for v in value.values())),
    "wholes": (
        lambda field: list(field.wholes()),
        lambda value: type(value) is list and all(type(v) is int and 0 <= v < 1000 for v in value),
    ),
    "none": (
        lambda field: field.or_none(JsonField.text),
        lambda value: value is None or type(value) is str,
    ),
}


@pytest.mark.parametrize("name", READERS)
@given(value=JSON)
def test_a_value_is_read_as_it_is_or_refused(name: str, value: object) -> None:
    read, fits = READERS[name]
    field = JsonField(value, "file", RULES)
    if fits(value):
        assert read(field) == value
    else:
        with pytest.raises(OddFile, match=r"(?s)^file.* is .*: expected .*; write it again$"):
            read(field)


@given(value=JSON, least=st.integers(-3, 3))
def test_booleans_are_not_whole_numbers(value: object, least: int) -> None:
    assert is_whole(value, least) == (type(value) is int and value >= least)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda top: top.entry("a").items()[1].entry("b").whole(5), "file.a[1].b is 4: expected a whole number of at"),
        (lambda top: top.entry("c"), "file is {'a': [0, {'b': 4}], 'x y': {'first': 1}, 'long': 'xxxxxx...: expected"),
        (lambda top: top.entry_or_null("c").text(), "file.c is None: expected text"),
        (lambda top: top.entry("a").object(), "file.a is list: expected an object"),
        (lambda top: top.members()["x y"].entries(Pair), "file['x y'] lacks 'second': expected first, second"),
        (lambda top: top.entries(Pair), "file lacks 'first', 'second': expected first, second"),
        (lambda top: top.entry("a").items()[1].items("pairs"), "file.a[1] is {'b': 4}: expected a list of pairs"),
        (lambda top: top.entry("a").one_of(("one", "other")), "expected one or other"),
        (lambda top: top.entry("long").whole(), f"file.long is '{'x' * 56}...: expected a whole number"),
        (lambda top: top.entry("x y").fail("is odd"), "file.x y is odd; write it again"),
    ],
)
def test_an_error_names_the_path_and_the_problem(read: Callable[[JsonField], object], message: str) -> None:
    top = JsonField({"a": [0, {"b": 4}], "x y": {"first": 1}, "long": "x" * 99}, "file", RULES)
    with pytest.raises(OddFile, match=re.escape(message)):
        read(top)


def test_entries_must_be_exactly_the_fields_of_the_class() -> None:
    field = JsonField({"first": 1, "second": 2}, "pair", RULES, prefix="")
    assert {name: entry.value for name, entry in field.entries(Pair).items()} == {"first": 1, "second": 2}
    assert field.entry("second").path == "second"
    more = JsonField({"first": 1, "second": 2, "third": 3}, "pair", RULES)
    with pytest.raises(OddFile, match="pair has the unknown 'third': expected first, second"):
        more.entries(Pair)
