"""Which tokens logits mean, and what mask slots predict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.sampling.choice import Bans, Greedy, top_candidates


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(8, 3000),
    peaks=st.integers(1, 6),
    most=st.integers(1, 4),
    banned=st.frozensets(st.integers(0, 7), max_size=3),
)
def test_the_top_candidates_are_those_of_a_softmax(
    seed: int, size: int, peaks: int, most: int, banned: frozenset[int]
) -> None:
    random = np.random.default_rng(seed)
    lines = random.normal(size=(3, size)).astype(np.float32)
    for line in lines:
        line[random.choice(size, peaks, replace=False)] += random.uniform(8, 12, peaks).astype(np.float32)
    weights = np.exp(lines.astype(np.float64))
    weights[:, list(banned)] = 0  # the probabilities are those of the other tokens
    probabilities = weights / weights.sum(axis=-1, keepdims=True)
    for candidate, line in zip(top_candidates(lines, most, banned), probabilities, strict=True):
        ranked = [token for token in np.argsort(-line, kind="stable").tolist() if token not in banned]
        likely = [token for token in ranked[:most] if line[token] > 0.01]
        assert list(candidate.tokens[: len(likely)]) == likely
        assert len(candidate.tokens) <= most
        for token, reported in zip(likely, candidate.probabilities, strict=False):
            assert reported == pytest.approx(line[token], rel=0.3)


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]), most=st.integers(1, 5))
def test_of_equal_scores_the_lowest_token_is_the_better_candidate(seed: int, spread: float, most: int) -> None:
    random = np.random.default_rng(seed)
    line = np.round(random.normal(size=3000) * spread).astype(np.float32)
    line[random.choice(3000, 20, replace=False)] += 9
    (found,) = top_candidates(line[None], most)
    assert list(found.tokens) == np.argsort(-line, kind="stable")[: len(found.tokens)].tolist()


def test_a_line_without_a_probable_token_gives_no_candidates() -> None:
    flat = np.stack([np.zeros(40_000), np.full(40_000, np.nan), np.random.default_rng(0).normal(size=40_000)])
    assert [candidate.tokens for candidate in top_candidates(flat.astype(np.float32), 3)] == [(), (), ()]


def test_a_banned_token_is_no_candidate_and_takes_no_probability_from_others() -> None:
    many = np.zeros(40_000, np.float32)
    many[[5, 7]] = (9.0, 8.9)
    many[20_000:] = 2.5  # within the limit, and too many to be candidates
    few = np.zeros(512, np.float32)
    few[[3, 5, 7]] = (30.0, 9.0, 8.0)
    for line, banned, most, tokens in ((many, 7, 3, (5,)), (few, 3, 2, (5, 7))):
        (found,) = top_candidates(line[None], most, frozenset({banned}))
        without = np.where(np.arange(line.size) == banned, -np.inf, line).astype(np.float32)
        assert [found] == list(top_candidates(without[None], most))
        assert found.tokens == tokens
        (one,) = Greedy(Bans(frozenset({banned}))).candidates(line[None], new_thread([0], 8), 1, 1)
        assert one.tokens == (5,)
    (unbanned,) = top_candidates(few[None], 4)
    assert unbanned.tokens == (3,)
