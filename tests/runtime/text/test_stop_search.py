"""Stop search: the first stop string to be complete cuts the text, and long lists of stop strings cost no more."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.text.stop_search import StopAutomaton, StopSearch, automaton_of
from support.small_tokenizers import cut_at

TEXTS = st.text("ab你", max_size=20)


@given(texts=st.lists(TEXTS, max_size=5), stops=st.lists(st.text("ab你", min_size=1, max_size=5), max_size=5))
def test_the_text_is_cut_before_the_first_stop_string_to_be_complete(texts: list[str], stops: list[str]) -> None:
    search, shown = StopSearch(tuple(stops)), ""
    for text in texts:
        shown += search.push(text)
        if search.stopped:
            break
        assert any(stop.startswith(search.held) for stop in stops) or not search.held
    expected, cut = cut_at("".join(texts), stops)
    assert (shown + search.finish(), search.stopped) == (expected, cut)


@given(texts=st.lists(TEXTS, max_size=5), stops=st.lists(st.text("ab你", min_size=1, max_size=5), max_size=5))
def test_the_text_can_include_its_stop_string(texts: list[str], stops: list[str]) -> None:
    before, after = StopSearch(tuple(stops)), StopSearch(tuple(stops), include_stop=True)
    cut = shown = ""
    for text in texts:
        cut += before.push(text)
        shown += after.push(text)
        if after.stopped:
            break
    assert after.stopped == before.stopped
    cut, shown = cut + before.finish(), shown + after.finish()
    assert shown.startswith(cut)
    if after.stopped:
        assert shown.removeprefix(cut) in stops
        assert "".join(texts).startswith(shown)
    else:
        assert shown == cut


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abcd", "bc"), "xabcd", "xa"),
        (("abcd", "b", "bc"), "abcd", "a"),
        (("ab", "xab"), "xab", ""),
        (("aab",), "aaaab", "aa"),
        (("a" * 300,), "a" * 299 + "b" + "a" * 300, "a" * 299 + "b"),
    ],
)
def test_of_stop_strings_that_end_together_the_longest_counts(stops: tuple[str, ...], text: str, expected: str) -> None:
    search = StopSearch(stops)
    shown = ""
    for sign in text:
        shown += search.push(sign)
        if search.stopped:
            break
    assert (shown, search.stopped) == (expected, True)


def steps_of(stops: tuple[str, ...], text: str) -> int:
    """The number of calls that a search takes for a text, in pieces of one character."""
    search, calls = StopSearch(stops), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "line"

    def trace(frame: object, event: str, argument: object) -> object:
        count(frame, event, argument)
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for sign in text:
            search.push(sign)
    finally:
        sys.settrace(None)
    return calls


def test_1000_stop_strings_of_1000_characters_cost_as_much_per_character_as_one() -> None:
    text = ("a" * 200 + "b") * 4
    one = steps_of(("a" * 999 + "c",), text)
    many = steps_of(tuple("a" * (999 - number % 7) + chr(0x4E00 + number) for number in range(1000)), text)
    assert many <= 1.1 * one


def test_a_long_text_costs_as_much_per_character_as_a_short_one() -> None:
    stops = ("a" * 255 + "c",)
    one, two, four, five = (steps_of(stops, "a" * size) for size in (1000, 2000, 4000, 5000))
    assert five - four <= 1.01 * (two - one)


def test_all_threads_of_a_request_share_an_automaton() -> None:
    assert automaton_of(("ab", "c")) is automaton_of(("ab", "c"))
    assert len(StopAutomaton(("abc", "abd")).depth) == 5
