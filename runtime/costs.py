"""Costs: what calls of an engine take, so that drafts and calls are no wider than they pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """The price of rows on an engine."""

    row: float  # what one row more adds to a call, in calls of one row
    call_rows: int  # rows that take as long as a call does for being one more


PROCESSOR = Costs(0.08, 16)  # measured on a CPU, see docs/performance.md

_LEAST_ROW = 0.0005  # less cannot be told from noise
_MOST_CALL_ROWS = 1024


def measured(seconds: Callable[[int], float], rows: int = 32) -> Costs:
    """The costs of an engine whose calls of so many rows take so many seconds."""
    one, many = seconds(1), seconds(rows)
    row = max(_LEAST_ROW, (many / one - 1) / (rows - 1))
    return Costs(row, min(_MOST_CALL_ROWS, max(1, round(1 / row))))
