"""Forked threads over a fake engine: each writes what it would write alone, whatever the drafts and the order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, Tree, request_for
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.manifest import TokenIds
from spaceport.graphs.signature import LOWERINGS, Lowering, visible_length
from spaceport.runtime.accept import Verdict
from spaceport.runtime.choice import Bans, Greedy
from spaceport.runtime.draft import Draft, Drafting, Guess
from spaceport.runtime.loop import step
from spaceport.runtime.plan import plan_thread, sees
from spaceport.runtime.request import STEP_ROWS, Request
from spaceport.runtime.slots import Slots
from spaceport.runtime.threads import Thread, new_thread

DRAFTINGS = st.builds(
    Drafting,
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
)
PROMPTS = st.lists(st.integers(0, END - 1), min_size=1, max_size=20)


def engine_for(language: Language, most: int, lowering: Lowering, requests: int = 1) -> HashEngine:
    """An engine with room for so many tokens and for one step beside them, and not one slot more."""
    return HashEngine(language, most + STEP_ROWS + 1, requests, lowering)


def text_of(request: Request) -> Tree:
    return {thread.path: thread.written for thread in request.threads}


def run(engine: HashEngine, request: Request) -> Request:
    while request.live:
        step(engine, [request])
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
        drafting=DRAFTINGS,
        chunk=st.integers(1, 20),
        max_threads=st.sampled_from((1, 2, 3, 8, 64)),
        max_depth=st.integers(0, 3),
        lowering=st.sampled_from(LOWERINGS),
    )
    def holds(
        language: Language,
        prompt: list[int],
        max_tokens: int,
        drafting: Drafting,
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
                drafting,
                chunk=chunk,
                max_threads=max_threads,
                max_depth=max_depth,
                total=total,
            ),
        )
        assert text_of(request) == expected
        assert request.slots.held == 0
        assert request.slots.height == 0
        assert not any(thread.sees.any() for thread in request.threads)
        assert request.statistics.tokens == size(expected) - len(expected) + 1
        assert request.statistics.peak_threads <= max_threads
        assert max(engine.widths) <= STEP_ROWS

    holds()
