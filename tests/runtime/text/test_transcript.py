"""Reading: whatever the order in which threads write, their text is that of the whole tree up to a stop string."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spaceport.runtime.text.transcript import Piece
from support.scripted_threads import FORK, Outcome, Path, Script, Writing, cases, events_of, line, outcome
from support.small_tokenizers import BROKEN, BYTES, FALLBACK, one_byte_each

BOTH = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])


def one_order_gives_what_the_whole_tree_gives(
    tokenizer: Tokenizer, script: Script, stops: list[str], seed: int
) -> Outcome:
    expected, writing = outcome(list(events_of(tokenizer, script)), stops), Writing(tokenizer, script, stops)
    pieces = writing.run(Random(seed))
    assert writing.outcome == expected
    assert "".join(piece.reading for piece in pieces) == expected[0]
    for thread in expected[2]:
        own = "".join(piece.text for piece in pieces if piece.thread == thread.path)
        assert own.startswith(thread.text)
        assert stops or own == thread.text
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("examples", [150, pytest.param(10_000, marks=pytest.mark.nightly)])
@BOTH
def test_every_order_of_writing_gives_the_text_that_the_whole_tree_has_up_to_a_stop_string(
    tokenizer: Tokenizer, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(case=cases(tokenizer), seed=st.integers(0, 10**6))
    def holds(case: tuple[Script, list[str]], seed: int) -> None:
        one_order_gives_what_the_whole_tree_gives(tokenizer, *case, seed)

    holds()


E_ACUTE = [Script((byte,)) for byte in one_byte_each("é")]
# a tree, a stop string, and then: the text, each thread's text, tokens ("|": [Fork]) and ending
TABLE: list[tuple[Script, str, str, dict[Path, tuple[str, str, str]]]] = [
    # without one
    (line("1.", line("a"), "2.", line("b"), "z", ending="length"), "#", "1.a2.bz",
     {(): ("1.2.z", "1.|2.|z", "length"), (0,): ("a", "a", "end"), (1,): ("b", "b", "end")}),
    # out of a child, which ended before
    (line("x", line("ya"), "bz"), "ab", "xy", {(): ("x", "x|b", "stop"), (0,): ("y", "ya", "end")}),
    # not beside a child that stands between
    (line("a", line("x"), "b"), "ab", "axb", {(): ("ab", "a|b", "end"), (0,): ("x", "x", "end")}),
    # but across one that says nothing
    (line("a", line(), "b"), "ab", "", {(): ("", "a|b", "stop"), (0,): ("", "", "end")}),
    # across three threads
    (line("xa", line("b", line("c"), "d"), "y"), "abc", "x",
     {(): ("x", "xa|", "stop"), (0,): ("", "b|", "stop"), (0, 0): ("", "c", "stop")}),
    # later threads are left out, earlier ones stay
    (line(line("c"), "x", line("p", line("q"), "#r", line("s"), "t"), "y", line("u"), "#v"), "#", "cxpq",
     {(): ("x", "|x|", "stop"), (0,): ("c", "c", "end"), (1,): ("p", "p|#", "stop"), (1, 0): ("q", "q", "end")}),
    # the first of two
    (line("x", line("a#b"), "y", line("c#d"), "#z"), "#", "xa", {(): ("x", "x|", "stop"), (0,): ("a", "a#", "stop")}),
    # what ends with a fork is no character any more
    (line("x", E_ACUTE[0], "y", E_ACUTE[1], "z"), "#", f"x{BROKEN}y{BROKEN}z",
     {(): ("xyz", "x|y|z", "end"), (0,): (BROKEN, "Ã", "end"), (1,): (BROKEN, "©", "end")}),
    # and may be a stop string
    (Script((*one_byte_each("xé")[:2], line("y"), *one_byte_each("z"))), BROKEN, "x", {(): ("x", "xÃ", "stop")}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "stop", "text", "threads"), TABLE)
def test_a_stop_string_is_searched_in_reading_order(
    script: Script, stop: str, text: str, threads: dict[Path, tuple[str, str, str]]
) -> None:
    for seed in range(30):
        found, tokens, parts = one_order_gives_what_the_whole_tree_gives(BYTES, script, [stop], seed)
        assert found == text
        assert {part.path: (part.text, spelled(part.tokens), part.ending) for part in parts} == threads
        assert sorted(spelled(tokens)) == sorted("".join(own for _, own, _ in threads.values()).replace("|", ""))


def spelled(tokens: tuple[int, ...]) -> str:
    return "".join("|" if token == FORK else BYTES.id_to_token(token) or "" for token in tokens)


def test_each_piece_says_what_it_adds_to_its_thread_and_to_what_can_be_read() -> None:
    one, a, two, b = tokens = one_byte_each("1a2b")
    writing = Writing(BYTES, line("1", line("a"), "2", line("b")))
    assert writing.write(()) == [
        Piece("1", one, False, (), "1"),
        Piece("", FORK, True, ()),
        Piece("2", two, False, ()),
        Piece("", FORK, True, ()),
    ]
    assert writing.write((1,)) == [Piece("b", b, False, (1,))]
    assert writing.write((0,), 1) == [Piece("a", a, False, (0,), "a")]
    assert writing.write((0,)) == [Piece("", None, False, (0,), "2b")]
    assert writing.reading.tokens() == tuple(tokens)
    assert [thread.fork for thread in writing.reading.finished()] == [None, 1, 3]


def test_a_stop_string_ends_its_thread_at_once_and_all_that_stands_behind() -> None:
    script = line("x", line("p"), "y", line(line("c"), "q#r"), "z", line("s"), "t")
    writing = Writing(BYTES, script, ["#", "t!"])
    for path in ((), (1,)):
        writing.write(path, 7)
    assert writing.threads[1,].ending == "stop"
    assert {path for path in writing.threads if writing.reading.is_cut_off(writing.threads[path])} == {(), (2,)}
    assert writing.reading.on_token(writing.threads[()], one_byte_each("t")[0], False)
    writing.end((), "stop")
    assert writing.reading.take() == []  # not even the "t" that was held back
    writing.write((0,))
    writing.write((1, 0))
    assert writing.outcome == outcome(list(events_of(BYTES, script)), ["#"])
