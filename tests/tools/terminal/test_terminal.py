"""Screens: text with drafted parts marked, text as it is, progress in lines or a bar, statistics."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spaceport.runtime.text.transcript import Piece
from spaceport.tools.terminal.generation import MarkedText, Span, marked
from spaceport.tools.terminal.screen import show_json, show_table, stages
from support.scripted_threads import FORK, Path, Script, Writing, cases, events_of, line
from support.small_tokenizers import BYTES, FALLBACK
from support.terminal import on_a_terminal

BOTH = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])
ASCII = st.text("ab \n[]", max_size=6).map(line)


PROGRAM = """
from spaceport.tools.terminal.screen import show_table, stages
show_table("\\nTo install [bold]", ("what [red]", "how"), [("a", "pip install 'spaceport[tensorrt]' :smile:")])
with stages() as stage:
    stage("not tensorrt: pip install 'spaceport[tensorrt]'")
"""


def trees(depth: int) -> st.SearchStrategy[Script]:
    """Trees in which each token is a character."""
    if not depth:
        return ASCII
    parts = st.lists(ASCII | trees(depth - 1).map(lambda child: Script((child,))), max_size=4)
    return parts.map(lambda scripts: Script(tuple(item for script in scripts for item in script.said)))


def added(pieces: Sequence[Piece]) -> list[Span]:
    text = MarkedText(FORK)
    return [span for piece in pieces for span in text.add(piece)]


def marks(spans: Sequence[Span]) -> list[tuple[str, bool]]:
    return [(letter, drafted) for text, drafted, _ in spans for letter in text]


@pytest.mark.slow
@BOTH
def test_the_spans_are_the_readable_text_in_every_order_of_tokens(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(case=cases(tokenizer), seed=st.integers(0, 10**6))
    def holds(case: tuple[Script, list[str]], seed: int) -> None:
        writing = Writing(tokenizer, *case)
        pieces = writing.run(Random(seed))
        text = MarkedText(FORK)
        for piece in pieces:
            assert "".join(span.text for span in text.add(piece)) == piece.reading

    holds()


@settings(max_examples=60)
@given(script=trees(2), seed=st.integers(0, 10**6))
def test_each_character_is_marked_as_its_token_is(script: Script, seed: int) -> None:
    writing, random, pieces = Writing(BYTES, script), Random(seed), list[Piece]()
    while writing.step(random):
        pieces += writing.reading.take()  # after each step, as the runtime does
    spans = added(pieces + writing.reading.take())
    expected, written = [], dict[Path, int]()
    for event in events_of(BYTES, script):
        if event.token is not None:
            written[event.path] = written.get(event.path, 0) + 1
            expected += [(letter, written[event.path] % 2 == 0) for letter in event.text]
    assert marks(spans) == expected


@settings(max_examples=60)
@given(script=trees(2), seed=st.integers(0, 10**6), steps=st.integers(0, 4))
def test_a_cancelled_generation_shows_all_text_so_far(script: Script, seed: int, steps: int) -> None:
    """All threads end at once, before the pieces of their last step are taken: marks may be lost, but no text."""
    writing, random = Writing(BYTES, script), Random(seed)
    for _ in range(steps):
        writing.step(random)
    for thread in writing.live:
        writing.end(thread.path, "total")
    spans = added(writing.reading.take())
    assert "".join(span.text for span in spans) == writing.reading.text


def test_drafted_spans_are_in_brackets_or_underlined_and_green_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [Span("a", False), Span("b", True), Span("c", True), Span("d", False), Span("e", True)]
    assert marked(spans, terminal=False) == ("a[bc]d[e", True)  # brackets may stay open between calls
    assert marked(spans[2:], terminal=False, open_bracket=True) == ("c]d[e", True)
    assert marked([], terminal=False, open_bracket=True) == ("", True)
    for no_color, green in (("", "\x1b[32m"), ("1", "")):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert marked(spans[:2], terminal=True) == (f"a{green}\x1b[4mb\x1b[0m", False)


def test_a_terminal_shows_text_in_brackets_and_a_bar() -> None:
    shown = on_a_terminal(PROGRAM)
    assert "To install [bold]" in shown
    assert "what [red]" in shown
    assert "pip install 'spaceport[tensorrt]' :smile:" in shown
    assert "not tensorrt: pip install 'spaceport[tensorrt]'" in shown


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Entries of a manifest could otherwise change the terminal, or forge lines of a table."""
    show_table("", ("name", "value"), [("a\x1b[2J", "b\nc\x9b31m\u202e"), ("é", "漢字")])
    shown = capsys.readouterr().out
    assert r"a\x1b[2J" in shown
    assert r"b\nc\x9b31m\u202e" in shown
    assert "漢字" in shown
    data = {"a\x1b": "\x9b31m é"}
    show_json(data)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert json.loads(shown) == data


def test_a_stage_that_still_runs_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spaceport.tools.terminal.screen._SILENCE", 0.05)
    with stages() as stage:
        time.sleep(0.2)
        stage("tracing the graph")
        time.sleep(0.5)
        stage("checking the graph")
    first, *again, last = (line.partition(" s  ")[2] for line in capfd.readouterr().err.splitlines())
    assert (first, {*again}, last) == ("tracing the graph", {"... tracing the graph"}, "checking the graph")
    time.sleep(0.1)
    assert capfd.readouterr().err == ""
