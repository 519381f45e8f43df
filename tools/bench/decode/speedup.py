"""Speedup: the speed of a mode relative to plain decoding in the same round, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Speedup:
    """The geometric mean over prompts of each prompt's median over rounds."""

    mean: float
    low: float  # lower end of the 95 % bootstrap interval over prompts and rounds
    high: float
    worst: float
    worst_line: int  # line number in the prompt file
    best: float
    best_line: int
    prompts: int  # number of prompts with a non-empty completion


def speedup_of(ratios: Mapping[int, Sequence[float]], seed: int) -> Speedup | None:
    """The speedup from the ratios of each prompt's rounds, by line number; None without prompts."""
    if not ratios:
        return None
    lines = list(ratios)
    logs = np.log([ratios[line] for line in lines])  # prompts x rounds
    medians = np.median(logs, axis=1)
    low, high = np.exp(np.quantile(_resampled(logs, seed), _INTERVAL)).tolist()
    worst, best = int(medians.argmin()), int(medians.argmax())
    values = np.exp(medians).tolist()
    return Speedup(
        float(np.exp(medians.mean())), low, high, values[worst], lines[worst], values[best], lines[best], len(lines)
    )


def _resampled(logs: np.ndarray, seed: int) -> np.ndarray:
    """The logarithm of the mean in bootstrap resamples of the prompts and of each prompt's rounds."""
    random = np.random.default_rng(seed)
    prompts, rounds = logs.shape
    found = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        sample = random.integers(0, prompts, (prompts, 1)), random.integers(0, rounds, (prompts, rounds))
        found[index] = np.median(logs[sample], axis=1).mean()
    return found
