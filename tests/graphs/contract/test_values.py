"""Values: JSON fields, measured rates and noise, and the messages of errors follow their rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import DraftAcceptance, DraftMethod, draft_acceptances, with_acceptance
from spaceport.graphs.contract.exactness import Exactness
from spaceport.graphs.contract.faults import InputFault, OptionFault, SpaceportError
from spaceport.graphs.contract.json_fields import JsonField, Rules, read
from spaceport.runtime.decoding import Decoding


class OddFile(InputFault):
    """An exception type of these tests."""


@dataclass(frozen=True)
class Pair:
    first: int
    second: int

    def __post_init__(self) -> None:
        if self.first > self.second:
            raise ValueError(f"first is {self.first}: expected at most second, {self.second}")


RULES = Rules(OddFile, advice="; write it again")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
READERS: dict[str, tuple[Callable[[JsonField], object], Callable[[Any], bool]]] = {
    "whole": (JsonField.whole, lambda value: type(value) is int and value >= 0),
    "text": (JsonField.text, lambda value: type(value) is str),
    "boolean": (JsonField.boolean, lambda value: type(value) is bool),
    "object": (JsonField.object, lambda value: type(value) is dict),
    "texts": (
        lambda field: read(field, dict[str, str]),
        lambda value: type(value) is dict and all(type(v) is str for v in value.values()),
    ),
    "wholes": (
        lambda field: list(field.wholes()),
        lambda value: type(value) is list and all(type(v) is int and v >= 0 for v in value),
    ),
    "none": (lambda field: field.or_none(JsonField.text), lambda value: value is None or type(value) is str),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(value=JSON)
def test_a_value_is_read_as_it_is_or_refused(name: str, value: object) -> None:
    read_as, fits = READERS[name]
    field = JsonField(value, "file", RULES)
    if fits(value):
        assert read_as(field) == value
    else:
        with pytest.raises(OddFile, match=r"(?s)^file.* is .*: expected .*; write it again$"):
            read_as(field)


@pytest.mark.parametrize(
    ("read_from", "message"),
    [
        (lambda top: top.entry("a").items()[1].entry("b").whole(5), "file.a[1].b is 4: expected a whole number of at"),
        (lambda top: top.entry("c"), "file is {'a': [0, {'b': 4}], 'x y': {'first': 1}, 'long': 'xxxxxx...: expected"),
        (lambda top: top.entry_or_null("c").text(), "file.c is None: expected text"),
        (lambda top: top.entry("a").object(), "file.a is list: expected an object"),
        (lambda top: top.members()["x y"].entries(Pair), "file['x y'] lacks 'second': expected first, second"),
        (lambda top: top.entries(Pair), "file lacks 'first', 'second': expected first, second"),
        (lambda top: read(top.entry("e"), Pair), "file.e.first is 5: expected at most second, 2; write it again"),
        (lambda top: read(top.entry("a"), tuple[int, int, int]), "file.a is [0, {'b': 4}]: expected 3 values"),
        (lambda top: read(top.entry("a"), tuple[int, str]), "file.a[1] is {'b': 4}: expected text"),
        (lambda top: top.entry("d").entries(Pair), "file.d has the unknown 'third': expected first, second"),
        (lambda top: top.entry("a").items()[1].items("pairs"), "file.a[1] is {'b': 4}: expected a list of pairs"),
        (lambda top: top.entry("a").one_of(("one", "other")), "expected one or other"),
        (lambda top: top.entry("long").whole(), f"file.long is '{'x' * 56}...: expected a whole number"),
        (lambda top: top.entry("x y").fail("is odd"), "file.x y is odd; write it again"),
    ],
)
def test_an_error_names_the_path_and_the_problem(read_from: Callable[[JsonField], object], message: str) -> None:
    more = {"first": 1, "second": 2, "third": 3}
    top = JsonField(
        {"a": [0, {"b": 4}], "x y": {"first": 1}, "long": "x" * 99, "d": more, "e": {"first": 5, "second": 2}},
        "file",
        RULES,
    )
    with pytest.raises(OddFile, match=re.escape(message)):
        read_from(top)


RATES = st.floats(0, 1)
MEASURED = st.builds(
    DraftAcceptance,
    rates=st.lists(RATES, max_size=64).map(lambda rates: tuple(sorted(rates, reverse=True))),
    lookup=st.just(()) | st.lists(RATES, min_size=5, max_size=5).map(tuple),
    temperature=st.floats(0, 2),
    tokens=st.integers(0, 10**9),
    data=st.sampled_from(["", "heldout.jsonl", "validation split of größe.jsonl"]),
    date=st.just("") | st.dates().map(str),
)


def read_acceptances(text: str) -> tuple[DraftAcceptance, ...]:
    return draft_acceptances(JsonField(json.loads(text), "acceptance", Rules(InputFault, "; measure again")))


@given(st.lists(MEASURED, max_size=4, unique_by=lambda entry: entry.temperature))
def test_rates_are_read_as_they_were_written(measured: list[DraftAcceptance]) -> None:
    assert read_acceptances(json.dumps([asdict(entry) for entry in measured])) == tuple(measured)


@given(st.lists(MEASURED, max_size=4), MEASURED)
def test_a_new_measurement_replaces_the_one_at_its_temperature(
    measured: list[DraftAcceptance], newest: DraftAcceptance
) -> None:
    known: tuple[DraftAcceptance, ...] = ()
    for entry in measured:
        known = with_acceptance(known, entry)
    found = with_acceptance(known, newest)
    temperatures = [entry.temperature for entry in found]
    assert temperatures == sorted({*(entry.temperature for entry in measured), newest.temperature})
    assert newest in found
    assert set(found) - {newest} == {entry for entry in known if entry.temperature != newest.temperature}


UNLESS_EQUAL = "equal unless two tokens are equally likely"


@pytest.mark.parametrize(
    ("rows", "slots", "tolerated", "words"),
    [
        (0, 0, 0, "bit-identical: draft trees, threads in parallel"),
        (0, 1e-6, 1e-5, f"{UNLESS_EQUAL} (within 1e-06): draft trees, threads in parallel"),
        (2e-6, 1e-6, 1e-5, f"{UNLESS_EQUAL} (within 2e-06): draft trees, threads in parallel"),
        (0, 4e-4, 0, "not exact (noise 4e-04 with other rows and KV slots): no drafts unless they are requested"),
        (3e-7, 0, 0, "not exact (noise 3e-07 with other rows and KV slots): no drafts unless they are requested"),
        (3e-5, 2e-5, 1e-5, "not exact (noise 3e-05 with other rows and KV slots): no drafts unless they are requested"),
    ],
)
def test_a_guarantee_is_put_into_words(rows: float, slots: float, tolerated: float, words: str) -> None:
    assert str(Exactness(rows, slots, tolerated, (2, 9))) == words
    assert Exactness(rows, slots, tolerated).guarantee == "not measured"


@pytest.mark.parametrize("noise", [-1e-9, float("nan"), float("inf")])
def test_noise_is_a_number(noise: float) -> None:
    with pytest.raises(ValueError, match="expected noise of at least 0"):
        Exactness(noise, 0.0, 0.0)


@pytest.mark.parametrize(
    ("exactness", "config", "threads"),
    [
        (Exactness(0.0, 1e-6, 1e-5, (2,)), (5, 3, 16), 16),
        (Exactness(0.0, 1e-6, 0.0, (2,)), (0, 3, 0), 1),
        (Exactness(1e-6, 0.0, 0.0, (2,)), (0, 3, 0), 1),
    ],
)
def test_defaults_follow_from_the_exactness(exactness: Exactness, config: tuple[int, ...], threads: int) -> None:
    drafts = Decoding().draft_config(DraftMethod(max_tokens=5), exactness.allows_drafts)
    assert (drafts.mask_slots, drafts.siblings, drafts.lookup) == config
    assert Decoding().threads(exactness.allows_drafts) == threads
    requested = Decoding(mask_slots=4, lookup=3, draft_siblings=2, max_threads=7)
    wide = requested.draft_config(DraftMethod(max_tokens=5), exactness.allows_drafts)
    assert (wide.mask_slots, wide.siblings, wide.lookup) == (4, 2, 3)
    assert requested.threads(exactness.allows_drafts) == 7
    assert Decoding(draft="chain").draft_config(DraftMethod(max_tokens=5), exactness.allows_drafts).mask_slots == 5


def test_the_middle_of_a_long_message_is_left_out() -> None:
    message = str(OptionFault("stop is " + "a" * 10**6 + ": expected fewer characters"))
    assert len(message) < 3600
    assert message.startswith("stop is aaa")
    assert "characters left out" in message
    assert message.endswith("aaa: expected fewer characters")
    for length in (0, 100, 3500):
        assert str(SpaceportError("b" * length)) == "b" * length
