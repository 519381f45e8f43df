"""Forked threads over a fake engine: each writes what it would write alone, whatever the drafts and the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.step import PREFILL_ROWS
from support.hash_engine import END, FORK, LAYOUTS, HashEngine, Language, Tree, advance, request_for

DRAFT_CONFIGS = st.builds(
    DraftConfig,
    mask_slots=st.integers(0, 5),
    shape=st.sampled_from(("chain", "tree")),
    rows=st.integers(1, 40),
    siblings=st.integers(1, 3),
    lookup=st.sampled_from((0, 3, 8)),
)
LANGUAGES = st.builds(
    Language,
    seed=st.integers(0, 10**6),
    quality=st.sampled_from((0, 30, 60, 90, 100)),
    end_every=st.sampled_from((4, 10, 30)),
    fork_every=st.sampled_from((3, 6, 12)),
    window=st.none() | st.integers(1, 30),
    mask_layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from((0, 0, 3)),
)
PROMPTS = st.lists(st.integers(0, END - 1), min_size=1, max_size=20)


def engine_for(language: Language, most: int, lowering: Lowering, requests: int = 1) -> HashEngine:
    """An engine with KV slots for this number of tokens and one more step."""
    return HashEngine(language, visible_length(most + STEP_ROWS + 1), requests, lowering)


def text_of(request: Request) -> Tree:
    return {thread.path: thread.generated for thread in request.threads}


def run(engine: HashEngine, request: Request, most: int | None = None, chunk: int = PREFILL_ROWS) -> Request:
    """Run to the end, with slots for this number of tokens and one more step."""
    if most is not None:
        request.slots = Slots(most + STEP_ROWS + 1, engine.lowering)
        request.slots.positions = np.zeros(engine.capacity, np.int64)  # masks are as wide as the engine's buffers allow
    while request.live:
        advance(engine, request, chunk=chunk)
    return request


def size(tree: Tree) -> int:
    return sum(len(text) for text in tree.values()) + len(tree) - 1


@pytest.mark.parametrize("examples", [pytest.param(400), pytest.param(20_000, marks=pytest.mark.nightly)])
def test_every_thread_writes_what_it_would_alone(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        language=LANGUAGES,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        draft_config=DRAFT_CONFIGS,
        chunk=st.integers(1, 20),
        max_threads=st.sampled_from((1, 2, 3, 8, 64)),
        max_depth=st.integers(0, 3),
        lowering=st.sampled_from(LOWERINGS),
    )
    def holds(
        language: Language,
        prompt: list[int],
        max_tokens: int,
        draft_config: DraftConfig,
        chunk: int,
        max_threads: int,
        max_depth: int,
        lowering: Lowering,
    ) -> None:
        expected = language.tree(prompt, len(prompt) + max_tokens, max_depth)
        total = size(expected) + 1  # one more than is needed
        engine = engine_for(language, len(prompt) + total, lowering)
        request = run(
            engine,
            request_for(
                engine,
                prompt,
                max_tokens,
                draft_config,
                max_threads=max_threads,
                max_depth=max_depth,
                total=total,
            ),
            len(prompt) + total,
            chunk,
        )
        assert text_of(request) == expected
        assert request.slots.held == 0
        assert request.slots.height == 0
        assert not any(thread.sees.any() for thread in request.threads)
        assert request.statistics.tokens == size(expected) - len(expected) + 1
        assert request.statistics.peak_threads <= max_threads
        assert max(engine.widths) <= STEP_ROWS

    holds()


@settings(max_examples=150)
@given(
    language=LANGUAGES,
    prompt=PROMPTS,
    draft_config=DRAFT_CONFIGS,
    total=st.integers(1, 60),
    max_threads=st.integers(1, 8),
    lowering=st.sampled_from(LOWERINGS),
)
def test_the_limit_on_all_threads_ends_them_where_they_are(
    language: Language, prompt: list[int], draft_config: DraftConfig, total: int, max_threads: int, lowering: Lowering
) -> None:
    expected = language.tree(prompt, len(prompt) + 30, 2)
    engine = engine_for(language, len(prompt) + total, lowering)
    request = run(
        engine,
        request_for(engine, prompt, 30, draft_config, max_threads=max_threads, max_depth=2, total=total),
        len(prompt) + total,
    )
    assert request.added == min(total, size(expected))
    for thread in request.threads:
        assert thread.generated == expected[thread.path][: len(thread.generated)]
        assert thread.ending == "total" or thread.generated == expected[thread.path]
    assert request.slots.held == 0


@settings(max_examples=150)
@given(
    language=LANGUAGES,
    prompt=PROMPTS,
    draft_config=DRAFT_CONFIGS,
    steps=st.integers(0, 12),
    max_threads=st.integers(1, 8),
    lowering=st.sampled_from(LOWERINGS),
)
def test_a_request_that_is_ended_from_outside_holds_nothing(
    language: Language, prompt: list[int], draft_config: DraftConfig, steps: int, max_threads: int, lowering: Lowering
) -> None:
    expected = language.tree(prompt, len(prompt) + 30, 2)
    engine = engine_for(language, len(prompt) + size(expected) + 1, lowering)
    request = request_for(engine, prompt, 30, draft_config, max_threads=max_threads, max_depth=2, total=10**6)
    while request.live and steps:
        advance(engine, request)
        steps -= 1
    request.finish("cancelled")
    assert not request.live
    assert request.slots.held == 0
    for thread in request.threads:
        assert thread.generated == expected[thread.path][: len(thread.generated)]


def test_threads_share_steps_and_hold_fewer_slots_than_one_line() -> None:
    """Four items of equal length: the steps are those of the longest way, not of all threads one after the other."""
    language = Language(1, end_every=14, fork_every=4)
    for seed in range(200):
        language.seed = seed
        expected = language.tree([1, 2, 3], 60, 1)
        if len(expected) < 5:
            continue
        engine = engine_for(language, 3 + size(expected) + 1, "scatter")
        together = run(engine, request_for(engine, [1, 2, 3], 57, 0, max_threads=64, max_depth=1, total=10**6))
        alone = run(engine, request_for(engine, [1, 2, 3], 57, 0, max_threads=1, max_depth=1, total=10**6))
        assert text_of(together) == text_of(alone) == expected
        ends = {path: len(text) + 1 for path, text in expected.items()}  # steps of a thread, its end token's included
        forks = [position for position, token in enumerate(expected[()]) if token == FORK]
        longest = max(ends[()], *(fork + 1 + ends[(i,)] for i, fork in enumerate(forks)))
        assert together.statistics.steps <= longest
        assert alone.statistics.steps > together.statistics.steps
        return
    pytest.fail("no language forked often enough")
