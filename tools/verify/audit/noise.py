"""Noise: how far an engine's logits move when the same tokens are fed in steps of other widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from spaceport.graphs.contract.signature import Activations
from spaceport.graphs.contract.tolerance import tolerance_of
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.logprobs import likeliest_in
from spaceport.tools.verify.feeding import Logits, Pace, feed, logits_of
from spaceport.tools.verify.thread_tokens import ThreadTokens

WIDTHS = (1, 2, 4, 9, 16, 36, 64)
_BESIDE = (1, 9)  # rows of each request where several stand side by side
_MOST_BESIDE = 4  # requests side by side
_PARTS = 64  # rows of a prompt in a step: cut otherwise than plain decoding does, as beside other texts
_OUTSTANDING = 16  # times the median of all ways; those of sound engines were within twice of it
_LIKELIEST = 16  # tokens of a row that are looked at; see docs/audit.md on why not all


@dataclass(frozen=True)
class Noise:
    """The largest difference of one way to feed from steps of one row, over all places that were fed."""

    rows: int
    requests: int
    places: int
    largest: float  # NaN: the logits held one
    limit: float  # what rounding explains

    @property
    def sound(self) -> bool:
        return self.largest <= self.limit  # NaN is not

    @property
    def name(self) -> str:
        """Such as `9 rows` or `4 x 9 rows`."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return rows if self.requests == 1 else f"{self.requests} x {rows}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "requests": self.requests,
            "places": self.places,
            "noise": None if np.isnan(self.largest) else self.largest,
            "limit": self.limit,
            "sound": self.sound,
        }


class NoiseTally:
    """What was seen of one way to feed: how many places, the largest difference there and the largest logit."""

    def __init__(self) -> None:
        self.places = 0
        self.largest = 0.0
        self.largest_logit = 0.0

    def feed(self, engine: Engine, lines: Sequence[ThreadTokens], plain: Sequence[Logits], pace: Pace) -> None:
        """Feed lines side by side; where there are too few, some of them twice."""
        which = list(islice(cycle(range(len(lines))), pace.requests))

        def hear(index: int, place: int, logits: Logits) -> None:
            line = which[index]
            self._compare(plain[line][place - lines[line].start], logits)

        feed(engine, [lines[line] for line in which], pace, hear)

    def _compare(self, plain: Logits, other: Logits) -> None:
        self.places += 1
        self.largest = float(np.maximum(self.largest, difference(plain, other)))  # NaN stays
        seen = np.abs(plain[np.isfinite(plain)])
        self.largest_logit = max(self.largest_logit, float(seen.max(initial=0.0)))


def measure(
    engine: Engine, lines: Sequence[ThreadTokens], gaps: bool = True, activations: Activations = "float"
) -> list[Noise]:
    """The noise of every width that an engine has, over these lines, in slots with gaps or as plain decoding has them."""
    ways = paces(engine, gaps)
    tallies = [NoiseTally() for _ in ways]
    room = min(_MOST_BESIDE, engine.requests)
    for first in range(0, len(lines), room):
        group = lines[first : first + room]
        plain = [logits_of(engine, line) for line in group]
        for pace, tally in zip(ways, tallies, strict=True):
            for begin in range(0, len(group), pace.requests):
                beside = slice(begin, begin + pace.requests)
                tally.feed(engine, group[beside], plain[beside], pace)
    fed = [(pace, tally) for pace, tally in zip(ways, tallies, strict=True) if tally.places]
    limit = limit_of([tally for _, tally in fed], tolerance_of(engine.signature.dtype, activations))
    return [Noise(pace.rows, pace.requests, tally.places, tally.largest, limit) for pace, tally in fed]


def limit_of(tallies: Sequence[NoiseTally], tolerance: float) -> float:
    """The largest difference that rounding explains: what the type allows, and not far beyond what is usual here.

    The type's is meant for engines of different kinds, and in half precision has room for a wrong bit of a mask.
    """
    moved = [tally.largest for tally in tallies if tally.largest > 0]  # NaN is not
    largest = max([1.0, *(tally.largest_logit for tally in tallies)])
    last_place = float(np.spacing(np.float32(largest)))  # no smaller difference is told apart there
    usual = max(last_place, median(moved)) if moved else last_place
    return min(tolerance * largest, _OUTSTANDING * usual)


def paces(engine: Engine, gaps: bool = True) -> list[Pace]:
    """The ways to feed that are measured on an engine."""
    alone = [Pace(rows, 1, _PARTS, gaps) for rows in WIDTHS if rows <= engine.rows]
    room = min(_MOST_BESIDE, engine.requests)
    beside = [Pace(rows, count, _PARTS, gaps) for count in sorted({2, room}) if 1 < count <= room for rows in _BESIDE]
    return [*alone, *beside]


def noise_of(found: Sequence[Noise]) -> float:
    """The largest noise that rounding explains: what goes beyond that is a fault, and hides no other."""
    return max((one.largest for one in found if one.sound), default=0.0)


def difference(plain: Logits, other: Logits) -> float:
    """The largest difference over the likeliest tokens of either row; NaN if either holds one."""
    if np.isnan(plain).any() or np.isnan(other).any():
        return np.nan
    tokens = sorted(set(_likeliest(plain)) | set(_likeliest(other)))
    left, right = plain[tokens].astype(np.float64), other[tokens].astype(np.float64)
    differ = left != right  # infinities that are the same differ by nothing
    return float(np.abs(left[differ] - right[differ]).max(initial=0.0))


def _likeliest(logits: Logits) -> list[int]:
    return likeliest_in(logits, min(_LIKELIEST, logits.size))
