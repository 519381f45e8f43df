"""G-test: the deviation of counts from expected probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


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
