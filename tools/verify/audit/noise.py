"""Noise: how much an engine's logits change when the same tokens are fed in steps of other widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.signature import Activations
from spaceport.runtime.comparison import ThreadTokens
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.sampler import most_probable
from spaceport.tools.verify.feeding import FeedPlan, Logits, feed, logits_of

WIDTHS = (1, 2, 4, 9, 16, 36, 64)
_BATCH_WIDTHS = (1, 9)  # rows of each request in batched calls
_MAX_BATCH = 4  # requests in a batched call
_PREFILL_CHUNK = 64  # smaller than the chunks of plain decoding, as when prompts share calls with other requests
_OUTLIER = 16  # times the median of all widths; on correct engines the ratio was at most 2
# Most probable tokens of a row that are compared: in half precision the errors of others are larger, and they are never
# chosen.
_TOP_TOKENS = 16


@dataclass(frozen=True)
class Noise:
    """The largest logit difference between one step width and steps of one row."""

    rows: int  # rows of each request in a step
    requests: int  # requests in a step
    positions: int  # positions that were compared
    largest: float  # NaN if some logits were NaN
    allowed: float  # the largest difference that rounding explains

    @property
    def passed(self) -> bool:
        return self.largest <= self.allowed  # False for NaN

    @property
    def name(self) -> str:
        """The step width, such as `9 rows` or `4 x 9 rows`."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return rows if self.requests == 1 else f"{self.requests} x {rows}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "requests": self.requests,
            "positions": self.positions,
            "noise": None if np.isnan(self.largest) else self.largest,
            "allowed": self.allowed,
            "passed": self.passed,
        }


class NoiseTally:
    """The logit differences of one step width: positions compared, largest difference, largest logit."""

    def __init__(self) -> None:
        self.positions = 0
        self.largest = 0.0
        self.largest_logit = 0.0

    def feed(self, engine: Engine, threads: Sequence[ThreadTokens], plain: Sequence[Logits], plan: FeedPlan) -> None:
        """Feed threads in shared calls, some of them twice if there are fewer than requests."""
        which = list(islice(cycle(range(len(threads))), plan.requests))

        def on_logits(index: int, position: int, logits: Logits) -> None:
            thread = which[index]
            self._compare(plain[thread][position - threads[thread].start], logits)

        feed(engine, [threads[thread] for thread in which], plan, on_logits)

    def _compare(self, plain: Logits, other: Logits) -> None:
        self.positions += 1
        self.largest = float(np.maximum(self.largest, difference(plain, other)))  # NaN propagates
        magnitudes = np.abs(plain[np.isfinite(plain)])
        self.largest_logit = max(self.largest_logit, float(magnitudes.max(initial=0.0)))


def measure(
    engine: Engine, threads: Sequence[ThreadTokens], gaps: bool = True, activations: Activations = "float"
) -> list[Noise]:
    """The noise of every step width of an engine on these threads; with `gaps` also of other KV slots."""
    plans = feed_plans(engine, gaps)
    tallies = [NoiseTally() for _ in plans]
    batch = min(_MAX_BATCH, engine.requests)
    for first in range(0, len(threads), batch):
        group = threads[first : first + batch]
        plain = [logits_of(engine, thread) for thread in group]
        for plan, tally in zip(plans, tallies, strict=True):
            for begin in range(0, len(group), plan.requests):
                part = slice(begin, begin + plan.requests)
                tally.feed(engine, group[part], plain[part], plan)
    fed = [(plan, tally) for plan, tally in zip(plans, tallies, strict=True) if tally.positions]
    allowed = allowed_noise([tally for _, tally in fed], tolerance_of(engine.signature.dtype, activations))
    return [Noise(plan.rows, plan.requests, tally.positions, tally.largest, allowed) for plan, tally in fed]


def allowed_noise(tallies: Sequence[NoiseTally], tolerance: float) -> float:
    """The largest difference that rounding explains: within the type's tolerance, and no outlier among the widths.

    The tolerance alone is too wide: it is meant for different engines, and in half precision exceeds the effect of one wrong
    mask bit.
    """
    nonzero = [tally.largest for tally in tallies if tally.largest > 0]  # NaN is left out
    largest = max([1.0, *(tally.largest_logit for tally in tallies)])
    spacing = float(np.spacing(np.float32(largest)))  # smallest difference in float32 at this magnitude
    usual = max(spacing, median(nonzero)) if nonzero else spacing
    return min(tolerance * largest, _OUTLIER * usual)


def feed_plans(engine: Engine, gaps: bool = True) -> list[FeedPlan]:
    """The step widths that are measured on an engine, with one request and with several."""
    single = [FeedPlan(rows, 1, _PREFILL_CHUNK, gaps) for rows in WIDTHS if rows <= engine.rows]
    batch = min(_MAX_BATCH, engine.requests)
    counts = [count for count in sorted({2, batch}) if 1 < count <= batch]
    batched = [FeedPlan(rows, count, _PREFILL_CHUNK, gaps) for count in counts for rows in _BATCH_WIDTHS]
    return [*single, *batched]


def noise_of(found: Sequence[Noise]) -> float:
    """The largest noise that rounding explains; larger noise is itself a fault and explains no mismatch."""
    return max((one.largest for one in found if one.passed), default=0.0)


def difference(plain: Logits, other: Logits) -> float:
    """The largest difference over the most probable tokens of either row; NaN if either row holds NaN."""
    if np.isnan(plain).any() or np.isnan(other).any():
        return np.nan
    tokens = sorted(set(_top_tokens(plain)) | set(_top_tokens(other)))
    left, right = plain[tokens].astype(np.float64), other[tokens].astype(np.float64)
    differ = left != right  # equal infinities do not differ
    return float(np.abs(left[differ] - right[differ]).max(initial=0.0))


def _top_tokens(logits: Logits) -> list[int]:
    tokens: list[int] = most_probable(logits, min(_TOP_TOKENS, logits.size)).tolist()
    return tokens
