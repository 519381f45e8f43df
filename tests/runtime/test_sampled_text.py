"""Sampled text: drawn as often as it is likely, and the same whatever drafts, trees and threads write it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.step import PREFILL_ROWS
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.sampling.choice import Bans
from spaceport.runtime.sampling.sampler import Sampled, Sampling, chooser
from support.hash_engine import CHILD, END, FORK, MASKS, Cell, HashEngine, Language, Tree, advance, request_for
from support.slow_sampling import probabilities_slowly, scores_slowly
from support.table_engine import Table

UNFORKED = Bans(frozenset((*MASKS, CHILD)), FORK, CHILD, 0)
LIKELY = 5  # tokens that the table writes

DRAFT_CONFIGS = st.builds(
    DraftConfig,
    mask_slots=st.integers(0, 5),
    shape=st.sampled_from(("chain", "tree")),
    rows=st.integers(1, 30),
    siblings=st.integers(1, 3),
    lookup=st.sampled_from((0, 4)),
)


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
SEEDS, HEADS = st.integers(0, 10**6), st.sampled_from((0, 3))
LANGUAGES = st.one_of(
    st.builds(
        Language,
        seed=SEEDS,
        quality=st.sampled_from((0, 60, 100)),
        end_every=st.sampled_from((4, 30)),
        fork_every=st.sampled_from((3, 9)),
        heads=HEADS,
    ),
    st.builds(Table, seed=SEEDS, doubt=st.sampled_from((0, 1)), heads=HEADS),
)


def write(
    language: Language, prompt: Sequence[int], choose: TokenSelector, limit: int, path: tuple[int, ...] = ()
) -> Tree:
    """The text of every thread, with no engine, no slots and no drafts; none is longer than `limit`."""
    thread = Thread(path, list(prompt), len(prompt), np.zeros(1, np.bool_))
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


def run(engine: HashEngine, request: Request, chunk: int = PREFILL_ROWS) -> Request:
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


def test_a_seed_writes_the_same_in_every_process() -> None:
    program = """if True:
        import numpy as np
        from spaceport.runtime.sampling.choice import Bans
        from spaceport.runtime.sampling.sampler import Sampling, chooser
        from spaceport.runtime.decode.threads import new_thread
        sampling = Sampling(1.0, top_p=0.95, seed=5, frequency_penalty=0.5, banned={"a": 8, "b": 16, "c": 0}.values())
        choose, thread = chooser(sampling, Bans(frozenset({3, 11, 19})), 1), new_thread([1], 1)
        logits = np.random.default_rng(1).normal(0, 2, 30).astype(np.float32)
        for _ in range(60):
            thread.tokens.append(choose.token(logits, thread, ()))
        print(thread.generated)
    """
    command = [sys.executable, "-c", program]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("0", "1")]
    found = {
        subprocess.run(command, env=one, capture_output=True, text=True, check=True).stdout for one in environments
    }
    assert len(found) == 1
    assert len(found.pop()) > 100


def excess(samples: Sequence[tuple[Mapping[Any, int], Mapping[Any, float]]]) -> float:
    """The G statistic of all samples (counts and probabilities), in standard deviations above its expectation."""
    g, freedom = 0.0, 0
    for counts, probabilities in samples:
        total = sum(counts.values())
        if any(not probabilities.get(outcome) for outcome in counts):
            return math.inf
        g += 2 * sum(
            count * math.log(count / (total * probabilities[outcome])) for outcome, count in counts.items() if count
        )
        freedom += sum(chance > 0 for chance in probabilities.values()) - 1
    return (g - freedom) / math.sqrt(2 * freedom)


@pytest.mark.slow
def test_drafted_tokens_and_pairs_are_written_as_often_as_they_are_likely() -> None:
    """700 short texts with one seed after the other."""
    table, sampling, steps = Table(4, tokens=LIKELY), Sampling(0.8, top_p=0.9, banned=[3]), 0
    engine, bans = HashEngine(table, 200, 1), replace(UNFORKED, never=UNFORKED.never | {3})
    singles: dict[int, Counter[int]] = defaultdict(Counter)
    pairs: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for seed in range(700):
        selector = Sampled(sampling, seed, bans, 1)
        request = run(engine, request_for(engine, [0], 12, DraftConfig(2, "chain"), selector=selector))
        text = request.threads[0].tokens
        steps += request.statistics.steps
        for before, token in pairwise(text):
            singles[before][token] += 1
        for before, one, other in zip(text[::2], text[1::2], text[2::2], strict=False):
            pairs[before][one, other] += 1
    assert sum(counts.total() for counts in singles.values()) > 1.3 * steps
    after: dict[int, dict[int, float]] = {}
    for before in range(LIKELY):
        scores = scores_slowly(table.logits(before).tolist(), sampling, (), (), {*bans.never, FORK})
        after[before] = dict(enumerate(probabilities_slowly(scores, sampling)[:LIKELY]))
    assert excess([(counts, after[before]) for before, counts in singles.items()]) < 4
    both = {
        before: {(one, other): row[one] * after[one][other] for one in row for other in row}
        for before, row in after.items()
    }
    assert excess([(counts, both[before]) for before, counts in pairs.items()]) < 4
