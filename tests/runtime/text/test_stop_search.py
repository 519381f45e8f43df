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
def test_the_text_is_cut_before_or_behind_the_first_stop_string_to_be_complete(
    texts: list[str], stops: list[str]
) -> None:
    search, after = StopSearch(tuple(stops)), StopSearch(tuple(stops), include_stop=True)
    shown = whole = ""
    for text in texts:
        shown += search.push(text)
        whole += after.push(text)
        assert search.stopped == after.stopped
        if search.stopped:
            break
        assert any(stop.startswith(search.held) for stop in stops) or not search.held
    expected, cut = cut_at("".join(texts), stops)
    assert (shown + search.finish(), search.stopped) == (expected, cut)
    whole += after.finish()
    assert "".join(texts).startswith(whole)
    assert whole.removeprefix(expected) in (stops if cut else [""])


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
    """The number of lines that a search runs for a text, in pieces of one character."""
    search, lines = StopSearch(stops), 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for sign in text:
            search.push(sign)
    finally:
        sys.settrace(None)
    return lines


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
