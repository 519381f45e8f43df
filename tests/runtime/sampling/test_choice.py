"""Which tokens logits mean, and what mask slots predict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.decode.threads import Thread, new_thread
from spaceport.runtime.sampling.choice import Bans, Greedy, top_candidates

FORK, CHILD = 7, 8


def thread(path: tuple[int, ...], *tokens: int) -> Thread:
    found = new_thread(tokens, 8)
    found.path = path
    return found


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


def test_a_banned_token_among_many_probable_ones_is_no_candidate() -> None:
    line = np.zeros(40_000, np.float32)
    line[[5, 7]] = (9.0, 8.9)
    line[20_000:] = 2.5  # within the limit, and too many to be candidates
    (found,) = top_candidates(line[None], 3, frozenset({7}))
    assert found.tokens == (5,)
    (expected,) = top_candidates(np.where(np.arange(40_000) == 7, -np.inf, line)[None].astype(np.float32), 3)
    assert found == expected


def test_a_line_without_a_probable_token_gives_no_candidates() -> None:
    flat = np.stack([np.zeros(40_000), np.full(40_000, np.nan), np.random.default_rng(0).normal(size=40_000)])
    assert [candidate.tokens for candidate in top_candidates(flat.astype(np.float32), 3)] == [(), (), ()]


def test_a_banned_token_is_no_candidate_though_it_is_the_most_probable() -> None:
    logits = np.array([[0, 9, 8, 1]], np.float32)
    assert top_candidates(logits, 1, {1})[0].tokens == (2,)
    assert Greedy(Bans(frozenset({1}))).candidates(logits, thread((), 0), 1, 1)[0].tokens == (2,)


@pytest.mark.parametrize(
    ("path", "tokens", "ahead", "forks"),
    [
        ((), (1, 2), (), True),
        ((), (1, FORK), (), False),
        ((), (1, 2), (3, FORK), False),
        ((), (1, FORK), (3,), True),
        ((0,), (1, FORK, CHILD), (), False),
        ((0,), (1, FORK, CHILD, 2), (), False),  # one fork deep already
    ],
)
def test_a_fork_follows_no_fork_and_begins_no_thread_too_deep(
    path: tuple[int, ...], tokens: tuple[int, ...], ahead: tuple[int, ...], forks: bool
) -> None:
    choose = Greedy(Bans(frozenset({CHILD}), FORK, CHILD, depth=1))
    logits = np.array([0, 1, 2, 3, 4, 0, 0, 9, 10], np.float32)
    assert choose.token(logits, thread(path, *tokens), ahead) == (FORK if forks else 4)


def test_a_banned_token_takes_no_probability_from_candidates() -> None:
    line = np.zeros(512, np.float32)
    line[[3, 5, 7]] = (30.0, 9.0, 8.0)
    (found,) = top_candidates(line[None], 4, frozenset({3}))
    (expected,) = top_candidates(np.where(np.arange(512) == 3, -np.inf, line)[None].astype(np.float32), 4)
    assert found.tokens[:2] == (5, 7)
    assert found == expected
    (unbanned,) = top_candidates(line[None], 4)
    assert unbanned.tokens == (3,)
