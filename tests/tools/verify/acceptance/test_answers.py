"""Answers: every thread of a forking answer equals what the model generates for that thread alone."""

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
from spaceport.tools.verify.acceptance.answers import Answer, AnswerThread, generate_answer
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.small_bundle import fill

PROMPT, MAX_TOKENS = (1, 2, 3), 24


def runtime_over(engine: HashEngine, folder: Path) -> Runtime:
    """A runtime whose model is a hash."""
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(folder), signature=engine.signature, tokens=tokens)
    return Runtime(Bundle(folder, manifest), engine, 64)


def expected(language: Language, max_depth: int) -> tuple[AnswerThread, ...]:
    """The threads, each generated alone."""
    limit = len(PROMPT) + MAX_TOKENS
    generated = language.tree(PROMPT, limit, max_depth)
    root = generated.pop(())
    forks = [index for index, token in enumerate(root) if token == FORK]
    threads: list[tuple[tuple[int, ...], list[int], int | None]] = [(PROMPT, root, None)]
    for (child,), tokens in sorted(generated.items()):
        threads.append(((*PROMPT, *root[: forks[child] + 1], CHILD), tokens, forks[child]))
    return tuple(
        AnswerThread(prefix, (*tokens, END), fork, "end")
        if len(prefix) + len(tokens) < limit
        else AnswerThread(prefix, tuple(tokens), fork, "length")
        for prefix, tokens, fork in threads
    )


@pytest.mark.parametrize("max_depth", [0, 1])
@pytest.mark.parametrize("max_threads", [1, 2, 64])
def test_each_thread_of_an_answer_equals_the_thread_generated_alone(
    max_threads: int, max_depth: int, tmp_path: Path
) -> None:
    engine = HashEngine(Language(0, 70, end_every=12, fork_every=5), 400 + STEP_ROWS + 1, 1)
    runtime = runtime_over(engine, tmp_path)
    endings = set()
    for seed in range(60):
        engine.language.seed = seed
        answer = generate_answer(runtime, PROMPT, MAX_TOKENS, seed % 3, max_threads, max_depth)
        assert answer.threads == expected(engine.language, max_depth)
        assert answer.statistics.tokens == sum(len(thread.text_tokens) for thread in answer.threads)
        endings |= {(thread.fork is None, thread.ending) for thread in answer.threads}
    assert len(endings) == 2 + 2 * max_depth  # root and child threads, each with both endings


def test_in_reading_order_each_child_replaces_its_fork() -> None:
    threads = (
        AnswerThread(PROMPT, (4, FORK, 5, FORK, 6, END), None, "end"),
        AnswerThread((*PROMPT, 4, FORK, CHILD), (7, 8), 1, "length"),
        AnswerThread((*PROMPT, 4, FORK, 5, FORK, CHILD), (END,), 3, "end"),
    )
    assert Answer(threads, Statistics()).text_tokens == (4, 7, 8, 5, 6)


@pytest.mark.parametrize(("prompt", "remaining"), [(64, 0), (63, 1)])
def test_an_answer_is_cut_at_the_maximum_context_length(prompt: int, remaining: int, tmp_path: Path) -> None:
    engine = HashEngine(Language(3, end_every=10**9), 64 + STEP_ROWS + 1, 1)
    (thread,) = generate_answer(runtime_over(engine, tmp_path), [1] * prompt, MAX_TOKENS, 1).threads
    assert (len(thread.tokens), thread.ending) == (remaining, "length")
    assert engine.calls == remaining


def test_an_answer_whose_threads_do_not_fit_names_the_options_to_change(tmp_path: Path) -> None:
    engine = HashEngine(Language(0, end_every=10**9, fork_every=3), 64 + STEP_ROWS + 1, 1)
    message = (
        r"need more than the 61 tokens that fit after its prompt of 3: raise --max-seq-len \(now 64\) or lower "
        r"--max-tokens \(now 50\)"
    )

    with pytest.raises(OptionFault, match=message):
        generate_answer(runtime_over(engine, tmp_path), PROMPT, 50, 0)
