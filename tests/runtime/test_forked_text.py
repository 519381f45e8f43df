"""Forked text on the demo model: each thread says what it would say if the threads were written one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from support.paths import DEMO as MODEL

ASKED: dict[str, Any] = json.loads((MODEL / "prompts.json").read_text("utf-8"))
QUESTIONS: dict[str, Prompt] = {
    "three": [{"role": "user", "content": ASKED["triangular"]["user"]}],
    "two": [{"role": "user", "content": "Explain the parameters of move( src, dst )"}],
    "none": ASKED["source"],
}
DRAFTS: list[dict[str, Any]] = [
    {"mask_slots": 1},
    {"mask_slots": 3, "draft": "chain"},
    {"draft": "chain"},
    {"draft_rows": 2},
    {"draft_rows": 60, "draft_siblings": 1},
    {"lookup": 6},
    {"mask_slots": 0, "lookup": 6},
]


@pytest.fixture(scope="module")
def runtime(any_demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(any_demo_bundle, threads=1, max_seq_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def reported(runtime: Runtime) -> dict[str, Completion]:
    """What is said plainly, one thread after the other."""
    plain = Decoding(mask_slots=0, max_threads=1, max_tokens=150)
    return {name: runtime.generate(prompt, plain) for name, prompt in QUESTIONS.items()}


@pytest.mark.parametrize("max_threads", [1, 2, 16])
@pytest.mark.parametrize("drafts", [{}, {"mask_slots": 0}, *DRAFTS], ids=str)
def test_no_draft_and_no_order_changes_what_a_thread_says(
    runtime: Runtime, reported: dict[str, Completion], drafts: dict[str, Any], max_threads: int
) -> None:
    for name, prompt in QUESTIONS.items():
        found = runtime.generate(prompt, Decoding(max_tokens=150, max_threads=max_threads, **drafts))
        expected = reported[name]
        assert (found.text, found.tokens, found.ending) == (expected.text, expected.tokens, expected.ending)
        assert sorted(thread.path for thread in found.threads) == sorted(thread.path for thread in expected.threads)
        assert {thread.path: thread for thread in found.threads} == {thread.path: thread for thread in expected.threads}
        assert found.statistics.peak_threads == min(max_threads, len(expected.threads))


def test_a_text_is_a_tree_of_threads_that_are_read_where_they_fork(runtime: Runtime) -> None:
    found = runtime.generate(QUESTIONS["three"])
    root, *children = found.threads
    fork = runtime.bundle.manifest.tokens.fork
    assert [(thread.path, thread.ending) for thread in found.threads] == [
        ((), "end"),
        ((0,), "end"),
        ((1,), "end"),
        ((2,), "end"),
    ]
    assert [thread.fork for thread in children] == [
        position for position, token in enumerate(root.tokens) if token == fork
    ]
    assert root.fork is None
    assert [child.text.strip().split(",")[0] for child in children] == ["It is optional"] * 3
    read, rest = "", root.text
    for number, child in enumerate(children, 1):
        head, rest = rest.split(f"{number}.", 1)
        name, rest = rest.split(":", 1)
        read += f"{head}{number}.{name}:{child.text}"
    assert read + rest == found.text
    assert fork not in found.tokens
    assert len(found.tokens) + 3 == sum(len(thread.tokens) for thread in found.threads) == found.statistics.tokens


@pytest.mark.parametrize("max_threads", [1, 16])
def test_pieces_name_their_thread_and_the_readable_text(runtime: Runtime, max_threads: int) -> None:
    with runtime.stream(QUESTIONS["three"], Decoding(max_threads=max_threads)) as stream:
        pieces = list(stream)
        found = stream.completion()
    assert "".join(piece.reading for piece in pieces) == found.text
    for thread in found.threads:
        own = [piece for piece in pieces if piece.thread == thread.path]
        assert "".join(piece.text for piece in own) == thread.text
        assert tuple(piece.token for piece in own if piece.token is not None) == thread.tokens
    order = [piece.thread for piece in pieces]
    root_ends = len(order) - order[::-1].index(())
    assert ((2,) in order[:root_ends]) == (max_threads > 1)


def test_threads_side_by_side_take_fewer_steps(runtime: Runtime) -> None:
    one, many = (
        runtime.generate(QUESTIONS["three"], Decoding(mask_slots=0, max_threads=threads)).statistics
        for threads in (1, 16)
    )
    assert one.tokens == many.tokens
    assert many.steps * 2 < one.steps


@pytest.mark.parametrize("max_threads", [1, 16])
def test_threads_hold_fewer_slots_than_the_same_text_in_one_line(runtime: Runtime, max_threads: int) -> None:
    """Each sees only its own part of the text, and releases it when it ends."""
    line = runtime.generate(QUESTIONS["three"], Decoding(fork=False, mask_slots=0))
    forked = runtime.generate(QUESTIONS["three"], Decoding(mask_slots=0, max_threads=max_threads))
    assert len(line.threads) == 1
    assert len(line.tokens) == len(forked.tokens)
    assert forked.statistics.peak_slots < line.statistics.peak_slots


def test_text_that_may_not_fork_is_one_line(runtime: Runtime) -> None:
    line = runtime.generate(QUESTIONS["three"], Decoding(fork=False))
    assert len(line.threads) == line.statistics.threads == 1
    assert line.threads[0].tokens == line.tokens
    assert runtime.generate(QUESTIONS["three"], Decoding(max_depth=0)).tokens == line.tokens


@pytest.mark.parametrize("stop", ["2. high", "second value", "default", "value. Its", ".\n", ":\n1", "Of these"])
@pytest.mark.parametrize("max_threads", [1, 16])
def test_a_stop_string_cuts_a_forked_text_where_it_is_read(
    runtime: Runtime, reported: dict[str, Completion], stop: str, max_threads: int
) -> None:
    whole = reported["three"].text
    for drafts in ({}, {"mask_slots": 0}, {"draft": "chain"}):
        found = runtime.generate(QUESTIONS["three"], Decoding(stop=stop, max_threads=max_threads, **drafts))
        assert found.text == whole[: whole.index(stop)]
        assert "stop" in [thread.ending for thread in found.threads]


@pytest.mark.parametrize("drafts", [{}, {"mask_slots": 0}, {"draft": "chain"}], ids=str)
def test_the_limit_on_all_threads_together_holds_to_the_token(runtime: Runtime, drafts: dict[str, Any]) -> None:
    for total in (1, 20, 25, 60):
        found = runtime.generate(QUESTIONS["three"], Decoding(max_total_tokens=total, **drafts))
        assert found.ending == "total"
        # [Child] takes a slot too
        assert found.statistics.tokens + found.statistics.threads - 1 in (total, total + 1)


@pytest.mark.parametrize("max_threads", [1, 16])
def test_each_thread_may_be_as_long_as_max_tokens_with_all_before_it(runtime: Runtime, max_threads: int) -> None:
    found = runtime.generate(QUESTIONS["three"], Decoding(max_tokens=40, max_threads=max_threads))
    root, *children = found.threads
    assert (root.ending, len(root.tokens)) == ("length", 40)
    for child in children:
        assert child.fork is not None
        length = child.fork + 2 + len(child.tokens)
        assert length <= 40
        assert child.ending == ("length" if length == 40 else "end")
