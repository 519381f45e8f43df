"""Timing: what calls cost is read off those that have become usual."""

from __future__ import annotations

import numpy as np
import pytest

from spaceport.runtime.backends.staging import CallShape, Limits, filled_up
from spaceport.runtime.backends.timing import ROWS, idle, timed
from spaceport.runtime.engine import Batch
from support.hash_engine import HashEngine, Language


class TickingEngine(HashEngine):
    """An engine whose calls take a while for themselves and for each row; the first ones, and some later, much longer."""

    time = 0.0

    def run(self, batch: Batch) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        self.calls += 1
        slow = self.calls <= 4 or self.calls % 3 == 0
        self.time += 100.0 if slow else 1.0 + 0.1 * batch.input_ids.shape[1]
        return np.zeros((1, 1, 1), np.float32)


def test_costs_are_those_of_calls_that_have_become_usual() -> None:
    engine = TickingEngine(Language(1), 128, 1)
    costs = timed(engine, lambda: engine.time)
    assert costs.row == pytest.approx(0.1 / 1.1)
    assert costs.call_rows == 11


def test_an_engine_with_little_room_is_measured_too() -> None:
    engine = TickingEngine(Language(1), 16, 1)
    engine.rows = 8
    assert timed(engine, lambda: engine.time).row == pytest.approx(0.1 / 1.1)


def test_the_calls_that_are_timed_are_what_they_seem() -> None:
    """None of their rows only fills up, and none is seen by another request."""
    engine = HashEngine(Language(1, window=8), 512, 2)
    for rows in (1, ROWS):
        batch = idle(engine, rows)
        assert filled_up(batch, engine.signature, Limits(512, 512, 512)) == CallShape(1, rows, 256, rows)
        assert batch.slot_ids.tolist() == [[*range(512 - rows, 512)]]
        assert batch.sliding_attention_mask is batch.attention_mask
