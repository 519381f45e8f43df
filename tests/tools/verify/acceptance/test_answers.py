"""Answers: the lines of a forking answer are what each thread writes for itself, ends and all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.acceptance.answers import Answer, AnswerThread, write_answer
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.small_bundle import fill

PROMPT, MOST = (1, 2, 3), 24


def runtime_over(engine: HashEngine, folder: Path) -> Runtime:
    """A runtime whose model is a hash."""
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(folder), signature=engine.signature, tokens=tokens)
    return Runtime(Bundle(folder, manifest), engine, 64)


def expected(language: Language, max_depth: int) -> tuple[AnswerThread, ...]:
    """The lines, each written for itself."""
    limit = len(PROMPT) + MOST
    texts = language.tree(PROMPT, limit, max_depth)
    spine = texts.pop(())
    forks = [place for place, token in enumerate(spine) if token == FORK]
    places: list[tuple[tuple[int, ...], list[int], int | None]] = [(PROMPT, spine, None)]
    for (child,), text in sorted(texts.items()):
        places.append(((*PROMPT, *spine[: forks[child] + 1], CHILD), text, forks[child]))
    return tuple(
        AnswerThread(before, (*text, END), fork, "end")
        if len(before) + len(text) < limit
        else AnswerThread(before, tuple(text), fork, "length")
        for before, text, fork in places
    )


@pytest.mark.parametrize("max_depth", [0, 1])
@pytest.mark.parametrize("max_threads", [1, 2, 64])
def test_each_line_of_an_answer_is_what_its_thread_writes_for_itself(
    max_threads: int, max_depth: int, tmp_path: Path
) -> None:
    engine = HashEngine(Language(0, 70, end_every=12, fork_every=5), 400 + STEP_ROWS + 1, 1)
    runtime = runtime_over(engine, tmp_path)
    endings = set()
    for seed in range(60):
        engine.language.seed = seed
        answer = write_answer(runtime, PROMPT, MOST, seed % 3, max_threads, max_depth)
        assert answer.lines == expected(engine.language, max_depth)
        assert answer.statistics.tokens == sum(len(line.text_tokens) for line in answer.lines)
        endings |= {(line.fork is None, line.ending) for line in answer.lines}
    assert len(endings) == 2 + 2 * max_depth  # spines and children of either ending


def test_an_answer_is_read_with_each_child_in_the_place_of_its_fork() -> None:
    before = (*PROMPT, 4, FORK, CHILD)
    lines = (
        AnswerThread(PROMPT, (4, FORK, 5, FORK, 6, END), None, "end"),
        AnswerThread(before, (7, 8), 1, "length"),
        AnswerThread((*PROMPT, 4, FORK, 5, FORK, CHILD), (END,), 3, "end"),
    )
    assert Answer(lines, Statistics()).text_tokens == (4, 7, 8, 5, 6)


@pytest.mark.parametrize(("prompt", "room"), [(64, 0), (63, 1)])
def test_a_prompt_that_leaves_no_room_gets_no_answer(prompt: int, room: int, tmp_path: Path) -> None:
    engine = HashEngine(Language(3, end_every=10**9), 64 + STEP_ROWS + 1, 1)
    (line,) = write_answer(runtime_over(engine, tmp_path), [1] * prompt, MOST, 1).lines
    assert (len(line.tokens), line.ending) == (room, "length")
    assert engine.calls == room


def test_an_answer_that_would_be_cut_says_what_to_raise(tmp_path: Path) -> None:
    engine = HashEngine(Language(0, end_every=10**9, fork_every=3), 64 + STEP_ROWS + 1, 1)
    message = "room for 61 tokens behind a prompt of 3 and need more: raise --max-seq-len .now 64. or lower --max-tokens .now 50."
    with pytest.raises(OptionFault, match=message):
        write_answer(runtime_over(engine, tmp_path), PROMPT, 50, 0)
