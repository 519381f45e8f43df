"""Sampled text: the same whatever drafts, trees and threads write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.engine import PREFILL_ROWS
from spaceport.runtime.sampling.choice import Bans
from spaceport.runtime.sampling.sampler import Sampling, chooser
from support.arrivals import DRAFT_CONFIGS
from support.hash_engine import CHILD, END, FORK, MASKS, Cell, HashEngine, Language, Tree, advance, request_for

UNFORKED = Bans(frozenset((*MASKS, CHILD)), FORK, CHILD, 0)

SAMPLINGS = st.builds(
    lambda temperature, seed, **options: Sampling(temperature, seed=seed if temperature else None, **options),
    temperature=st.sampled_from((0, 0.3, 1, 1.5)),
    top_k=st.sampled_from((0, 3)),
    top_p=st.sampled_from((1, 0.8)),
    min_p=st.sampled_from((0, 0.1)),
    repetition_penalty=st.sampled_from((1, 1.3)),
    presence_penalty=st.sampled_from((0, 0.5)),
    frequency_penalty=st.sampled_from((0, 0.3, -0.2)),
    logit_bias=st.dictionaries(st.integers(0, 13), st.floats(-2, 2), max_size=2),
    banned=st.sets(st.integers(0, 9), max_size=2),
    seed=st.integers(0, 2**64 - 1),
)
LANGUAGES = st.builds(
    Language,
    seed=st.integers(0, 10**6),
    quality=st.sampled_from((0, 60, 100)),
    end_every=st.sampled_from((4, 30)),
    fork_every=st.sampled_from((3, 9)),
    heads=st.sampled_from((0, 3)),
)


def write(
    language: Language, prompt: Sequence[int], choose: TokenSelector, limit: int, path: tuple[int, ...] = ()
) -> Tree:
    """The text of every thread, with no engine, no slots and no drafts; none is longer than `limit`."""
    thread = TokenSequence(path, list(prompt), len(prompt), np.zeros(1, np.bool_))
    cells: list[Cell] = []
    for token in prompt:
        cells.append(language.follow(cells, token))
    found: Tree = {path: (text := [])}
    while len(cells) < limit and (token := choose.token(language.logits(cells[-1].state), thread, ())) != END:
        text.append(token)
        thread.tokens.append(token)
        cells.append(language.follow(cells, token))
        if token == FORK:
            child = (*path, text.count(FORK) - 1)
            found |= write(language, [*thread.tokens, CHILD], choose, limit, child)
    return found


def run(engine: HashEngine, request: SequenceGroup, chunk: int = PREFILL_ROWS) -> SequenceGroup:
    while request.live:
        advance(engine, request, chunk=chunk)
    return request


@settings(max_examples=200)
@given(
    language=LANGUAGES,
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    max_tokens=st.integers(1, 16),
    sampling=SAMPLINGS,
    draft_config=DRAFT_CONFIGS,
    chunk=st.integers(1, 10),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    lowering=st.sampled_from(LOWERINGS),
)
def test_a_seed_writes_the_same_with_any_drafts_or_none(
    language: Language,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    draft_config: DraftConfig,
    chunk: int,
    limits: tuple[int, int],
    lowering: Lowering,
) -> None:
    max_threads, max_depth = limits
    choose = chooser(sampling, replace(UNFORKED, depth=max_depth), len(prompt))
    expected = write(language, prompt, choose, len(prompt) + max_tokens)
    most = len(prompt) + sum(len(text) + 1 for text in expected.values())
    engine = HashEngine(language, most + STEP_ROWS + 1, 1, lowering)
    # the same selector: what it counted for other threads on the same paths does not matter
    request = request_for(
        engine, prompt, max_tokens, draft_config, MASKS[:1], max_threads, max_depth, 10**6, selector=choose
    )
    assert {thread.path: thread.generated for thread in run(engine, request, chunk).threads} == expected
