"""Noise: how far an engine's logits move when the same tokens are fed in steps of other widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np

from spaceport.graphs.tolerance import TOLERANCE
from spaceport.runtime.engine import Engine
from spaceport.runtime.logprobs import likeliest_in
from spaceport.tools.audit.feeding import Logits, Pace, feed, logits_of
from spaceport.tools.audit.lines import Line

WIDTHS = (1, 2, 4, 9, 16, 36, 64)
_BESIDE = (1, 9)  # rows of each request where several stand side by side
_MOST_BESIDE = 4  # requests side by side
_PARTS = 64  # rows of a prompt in a step: cut otherwise than plain decoding does, as beside other texts
_LIKELIEST = 16  # tokens of a row that are looked at; see docs/audit.md on why not all


@dataclass(frozen=True)
class Noise:
    """The largest difference of one way to feed from steps of one row, over all places that were fed."""

    rows: int
    requests: int
    places: int
    largest: float  # NaN: the logits held one
    largest_logit: float
    tolerance: float  # of the largest logit, and at least absolutely: what rounding explains

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        return self.tolerance * max(1.0, self.largest_logit)

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


def measure(engine: Engine, lines: Sequence[Line]) -> list[Noise]:
    """The noise of every width that an engine has, over these lines."""
    ways = paces(engine)
    tallies = [_Tally() for _ in ways]
    room = min(_MOST_BESIDE, engine.requests)
    for first in range(0, len(lines), room):
        group = lines[first : first + room]
        plain = [logits_of(engine, line) for line in group]
        for pace, tally in zip(ways, tallies, strict=True):
            for begin in range(0, len(group), pace.requests):
                beside = slice(begin, begin + pace.requests)
                tally.feed(engine, group[beside], plain[beside], pace)
    tolerance = TOLERANCE[engine.signature.dtype]
    return [tally.noise(pace, tolerance) for pace, tally in zip(ways, tallies, strict=True) if tally.places]


def paces(engine: Engine) -> list[Pace]:
    """The ways to feed that are measured on an engine."""
    alone = [Pace(rows, 1, _PARTS) for rows in WIDTHS if rows <= engine.rows]
    room = min(_MOST_BESIDE, engine.requests)
    beside = [Pace(rows, count, _PARTS) for count in sorted({2, room}) if 1 < count <= room for rows in _BESIDE]
    return [*alone, *beside]


def noise_of(found: Sequence[Noise]) -> float:
    """The largest noise that rounding explains: what goes beyond that is a fault, and hides no other."""
    return max((one.largest for one in found if one.sound), default=0.0)


class _Tally:
    """What was seen of one way to feed."""

    def __init__(self) -> None:
        self.places = 0
        self._largest = 0.0
        self._largest_logit = 0.0

    def feed(self, engine: Engine, lines: Sequence[Line], plain: Sequence[Logits], pace: Pace) -> None:
        """Feed lines side by side; where there are too few, some of them twice."""
        which = list(islice(cycle(range(len(lines))), pace.requests))

        def hear(index: int, place: int, logits: Logits) -> None:
            line = which[index]
            self._compare(plain[line][place - lines[line].start], logits)

        feed(engine, [lines[line] for line in which], pace, hear)

    def noise(self, pace: Pace, tolerance: float) -> Noise:
        return Noise(pace.rows, pace.requests, self.places, self._largest, self._largest_logit, tolerance)

    def _compare(self, plain: Logits, other: Logits) -> None:
        self.places += 1
        self._largest = float(np.maximum(self._largest, difference(plain, other)))  # NaN stays
        seen = np.abs(plain[np.isfinite(plain)])
        self._largest_logit = max(self._largest_logit, float(seen.max(initial=0.0)))


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
