"""Timing: step costs are read off calls that have become usual, within a budget."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.backends.staging import CallShape, Limits, filled_up
from spaceport.runtime.backends.timing import idle, measure
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.engine import Batch
from support.hash_engine import HashEngine, Language


@dataclass
class TickingEngine(HashEngine):
    """An engine whose calls take a while for themselves, each row and each visible slot; now and then much longer."""

    time: float = 0.0
    call: float = 0.01

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.calls += 1
        visible = batch.attention_mask.shape[-1]
        requests, rows = batch.input_ids.shape
        usual = self.call * (1 + 0.1 * requests * rows + requests * rows * visible / 10_000)
        self.time += 50 * usual if self.calls <= 1 or self.calls % 5 == 0 else usual
        return np.zeros((1, 1, 1), np.float32)


def measured(engine: TickingEngine, budget: float = 1e9) -> StepCosts:
    """What is measured where nothing else runs."""
    return measure(engine, budget, lambda: engine.time, lambda: engine.time)


def test_costs_are_those_of_calls_that_have_become_usual() -> None:
    engine = TickingEngine(Language(1), 2048, 4)
    table = measured(engine, 1e9)
    single = dict(table.single)
    assert [*single] == [1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 33, 36, 64]
    for rows, seconds in table.single:
        assert seconds == pytest.approx(0.01 * (1 + 0.1256 * rows), rel=1e-6)
    assert dict(table.batched) == pytest.approx({rows: 0.01 * (1 + 0.1256 * 4 * rows) for rows in (1, 4, 9)})
    assert (table.visible, table.requests) == (256, 4)
    assert (table.slot, table.row_slot) == (pytest.approx(1e-6), pytest.approx(1e-6))


def test_other_processes_do_not_add_to_the_costs_of_a_cpu() -> None:
    """They take turns with each call, which then takes two to three times as long."""
    draws, engine = random.Random(0), TickingEngine(Language(1), 2048, 4)
    engine.device = "cpu"
    waited = 0.0

    def clock() -> float:
        nonlocal waited
        waited += draws.uniform(0.0, engine.time)
        return engine.time + waited

    busy = measure(engine, 1e30, clock, lambda: engine.time)
    quiet = measured(TickingEngine(Language(1), 2048, 4))
    assert dict(busy.single) == pytest.approx(dict(quiet.single))


def test_a_call_with_other_kv_buffers_than_the_one_before_is_not_timed() -> None:
    """The first call with another number of requests or of visible KV slots binds all buffers."""

    @dataclass
    class BindingEngine(TickingEngine):
        bound: tuple[int, int] = (0, 0)
        cold: int = 40  # calls until caches are warm: those of the first round

        def run(self, batch: Batch) -> NDArray[np.float32]:
            buffers = len(batch.input_ids), batch.attention_mask.shape[-1]
            self.time += 1.0 if self.bound != buffers or self.cold > 0 else 0.0
            self.bound, self.calls, self.cold = buffers, 1, self.cold - 1  # never disturbed otherwise
            return super().run(batch)

    table = measured(BindingEngine(Language(1), 2048, 4))
    assert dict(table.single) == pytest.approx({rows: 0.01 * (1 + 0.1256 * rows) for rows, _ in table.single})
    assert dict(table.batched) == pytest.approx({rows: 0.01 * (1 + 0.1256 * 4 * rows) for rows in (1, 4, 9)})


def test_an_engine_with_few_slots_is_measured_too() -> None:
    engine = TickingEngine(Language(1), 16, 1)
    engine.rows = 8
    table = measured(engine, 1e9)
    assert [rows for rows, _ in table.single] == [1, 2, 4, 6, 8]
    assert (table.visible, table.slot, table.batched) == (16, 0.0, ())


@pytest.mark.parametrize(("call", "most"), [(0.0001, 13), (0.05, 6), (1.0, 2)])
def test_measuring_takes_no_longer_than_the_budget_by_much(call: float, most: int) -> None:
    """A large model is measured at fewer points, the most informative ones."""
    engine = TickingEngine(Language(1), 256, 1, call=call)
    table = measured(engine, 2.0)
    assert len(table.single) <= most
    assert table.single[0][0] == 1
    # a call of one and of four rows is timed a few times whatever it takes; the engine's first call is disturbed
    assert engine.time <= max(2.0, 12 * 2 * call) + 3 * 50 * 1.2 * call


def test_costs_of_many_requests_are_extrapolated_from_eight() -> None:
    """Calls of all would take longer than there is time, and memory that nobody may ever need."""
    engine = TickingEngine(Language(1), 2048, 64)
    table = measured(engine, 1e9)
    assert table.requests == 8
    assert dict(table.batched) == pytest.approx({rows: 0.01 * (1 + 0.1256 * 8 * rows) for rows in (1, 4, 9)})


def test_the_calls_that_are_timed_are_what_they_seem() -> None:
    """None of their rows only fills up, and all of them are visible."""
    engine = HashEngine(Language(1, window=8), 512, 2)
    for rows in (1, 36):
        batch = idle(engine, rows)
        assert filled_up(batch, engine.signature, Limits(512, 512, 512)) == CallShape(1, rows, 256, rows)
        assert batch.slot_ids.tolist() == [[*range(256 - rows, 256)]]
        assert batch.sliding_attention_mask is batch.attention_mask
