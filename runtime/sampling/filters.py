"""Filters: top-k, top-p and min-p; among equal scores the lower id ranks first."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def survivors(
    scores: NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that pass all filters, in the order of their ids, with their scores.

    Scores are log probabilities up to a constant; the highest is 0. With top_k 0, top_p 1 and min_p 0 all pass.
    """
    tokens, left = _all_tokens(scores.size), scores
    if 0 < top_k < scores.size:
        tokens = np.sort(best(scores, top_k))
        left = scores[tokens]
    if top_p < 1:
        passing = _nucleus(left, top_p)
        tokens, left = tokens[passing], left[passing]
    if min_p > 0:
        (passing,) = np.nonzero(left >= math.log(min_p))
        tokens, left = tokens[passing], left[passing]
    return tokens, left


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` best scores, best first."""
    floor, columns = -np.inf, scores.size // 16
    if count <= columns:  # the maxima of `count` columns reach it: far fewer scores to sort
        heads = scores[: scores.size // columns * columns].reshape(-1, columns).max(axis=0)
        floor = np.partition(heads, columns - count)[columns - count]
    return _ranked(scores, floor)[:count]


def _nucleus(scores: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest best scores that together have this share of the probability."""
    weights = np.exp(scores)
    total = weights.sum()
    enough = top_p * total
    order, reached = np.empty(0, np.int64), np.empty(0)
    for share in (1e-2, 1e-4, 1e-6, 0):  # usually a few tokens have nearly all of it, so there is little to sort
        order = _ranked(scores, math.log(total * share) if share else -np.inf)
        reached = weights[order].cumsum()
        if order.size and reached[-1] >= enough:
            break
    return np.sort(order[: np.searchsorted(reached, enough) + 1])


def _ranked(scores: NDArray[np.float64], floor: float) -> NDArray[np.int64]:
    """Indices of the scores that reach a limit, best first."""
    (near,) = np.nonzero(scores >= floor)
    return near[np.argsort(-scores[near], kind="stable")]


@lru_cache(maxsize=8)
def _all_tokens(count: int) -> NDArray[np.int64]:
    tokens = np.arange(count)
    tokens.setflags(write=False)
    return tokens
