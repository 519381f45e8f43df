"""Filters: which tokens may be drawn at all, by their scores alone; of equal scores the lower id ranks first."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def survivors(
    scores: NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that pass one filter after the other, in the order of their ids, and their scores.

    Scores are log-probabilities but for a constant, the highest is 0. With top_k 0, top_p 1 and min_p 0 all pass.
    """
    tokens, left = _everyone(scores.size), scores
    if 0 < top_k < scores.size:
        tokens = np.sort(best(scores, top_k))
        left = scores[tokens]
    if top_p < 1:
        kept = _nucleus(left, top_p)
        tokens, left = tokens[kept], left[kept]
    if min_p > 0:
        (kept,) = np.nonzero(left >= math.log(min_p))
        tokens, left = tokens[kept], left[kept]
    return tokens, left


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """So many places, best first."""
    floor, columns = -np.inf, scores.size // 16
    if count <= columns:  # the best of that many columns reach it, which is far fewer to sort than all
        heads = scores[: scores.size // columns * columns].reshape(-1, columns).max(axis=0)
        floor = np.partition(heads, columns - count)[columns - count]
    return _ranked(scores, floor)[:count]


def _nucleus(scores: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """The fewest best places that together hold this share of the probability."""
    weights = np.exp(scores)
    total = weights.sum()
    enough = top_p * total
    order, reached = np.empty(0, np.int64), np.empty(0)
    for share in (1e-2, 1e-4, 1e-6, 0):  # as a rule few tokens hold nearly all, and there is little to sort
        order = _ranked(scores, math.log(total * share) if share else -np.inf)
        reached = weights[order].cumsum()
        if order.size and reached[-1] >= enough:
            break
    return np.sort(order[: np.searchsorted(reached, enough) + 1])


def _ranked(scores: NDArray[np.float64], floor: float) -> NDArray[np.int64]:
    """The places that reach a score, best first."""
    (near,) = np.nonzero(scores >= floor)
    return near[np.argsort(-scores[near], kind="stable")]


@lru_cache(maxsize=8)
def _everyone(count: int) -> NDArray[np.int64]:
    tokens = np.arange(count)
    tokens.setflags(write=False)
    return tokens
