"""G-test: how far counts are off the odds that they should have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def excess(samples: Sequence[tuple[Mapping[Any, int], Mapping[Any, float]]]) -> float:
    """G of all samples together, each counts and odds, in standard deviations above what chance makes it."""
    g, freedom = 0.0, 0
    for counts, odds in samples:
        total = sum(counts.values())
        if any(not odds.get(outcome) for outcome in counts):
            return math.inf
        g += 2 * sum(count * math.log(count / (total * odds[outcome])) for outcome, count in counts.items() if count)
        freedom += sum(chance > 0 for chance in odds.values()) - 1
    return (g - freedom) / math.sqrt(2 * freedom)
