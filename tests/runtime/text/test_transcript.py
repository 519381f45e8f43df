"""Reading: whatever the order in which threads write, their text is that of the whole tree up to a stop string."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.text.piece import Piece
from spaceport.runtime.text.tokenizer import TextStream
from spaceport.runtime.text.transcript import Transcript
from support.scripted_threads import FORK, Outcome, Path, Script, Writing, cases, events_of, line, outcome, prompt
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


@settings(max_examples=100)
@given(
    tokens=st.lists(st.integers(2, BYTES.get_vocab_size() - 1), max_size=30),
    stops=st.lists(st.text(" ab你the" + BROKEN, min_size=1, max_size=3), max_size=3),
)
def test_a_text_without_forks_is_that_of_its_stream(tokens: list[int], stops: list[str]) -> None:
    stream = TextStream(BYTES, tuple(stops))
    writing = Writing(BYTES, Script(tuple(tokens)), stops)
    for token in tokens:
        shown = stream.push(token)
        (piece,) = writing.write((), 1)
        assert (piece.text, piece.token, piece.thread, piece.reading) == (shown, token, (), shown)
        if stream.stopped:
            break
    rest = stream.finish()
    assert [(piece.text, piece.reading) for piece in writing.write(())] == ([(rest, rest)] if rest else [])
    text, _, (thread,) = writing.outcome
    assert text == stream.text == thread.text
    assert thread.ending == ("stop" if stream.stopped else "end")


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


def test_what_was_held_back_lengthens_the_last_piece_of_its_thread_that_was_not_taken() -> None:
    x, a = one_byte_each("xa")
    assert Writing(BYTES, line("xa"), ["ab"]).write(()) == [Piece("x", x, False, (), "x"), Piece("a", a, True, (), "a")]
    taken = Writing(BYTES, line("xa"), ["ab"])
    assert taken.write((), 2) == [Piece("x", x, False, (), "x"), Piece("", a, True, ())]
    assert taken.write(()) == [Piece("a", None, False, (), "a")]
    behind = Writing(BYTES, line("a", line("x")), ["ab"])  # a fork: it is shown in its thread and cannot be read yet
    assert [(piece.text, piece.reading) for piece in behind.write((), 2)] == [("", ""), ("a", "")]
    for ask in (behind.reading.finished, behind.reading.tokens):
        with pytest.raises(ValueError, match=r"thread \(0?,?\) has not ended"):
            ask()
    assert [(piece.text, piece.reading) for piece in behind.write((0,), 1)] == [("x", "ax")]


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


def test_a_fork_is_not_shown_where_the_tokenizer_thinks_it_is_a_word() -> None:
    (fork,) = one_byte_each("|")
    thread = new_thread(prompt(BYTES), 1)
    reading = Transcript(BYTES, (), fork)
    for token in one_byte_each("a|b"):
        thread.tokens.append(token)
        assert not reading.on_token(thread, token, False)
    thread.ending = "length"
    reading.on_end(thread)
    assert reading.text == "ab"
    assert reading.tokens() == tuple(one_byte_each("ab"))
    assert spelled(reading.finished()[0].tokens) == "a|b"


def test_pieces_and_text_may_end_with_their_stop_string() -> None:
    thread = new_thread(prompt(BYTES), 1)
    reading = Transcript(BYTES, ("bc",), include_stop=True)
    found = []
    for token in one_byte_each("abc"):
        thread.tokens.append(token)
        found.append(reading.on_token(thread, token, False))
    thread.ending = "stop"
    reading.on_end(thread)
    pieces = reading.take()
    assert found == [False, False, True]
    assert [piece.text for piece in pieces] == [piece.reading for piece in pieces] == ["a", "", "bc"]
    assert reading.text == reading.finished()[0].text == "abc"
