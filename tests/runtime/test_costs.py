"""Step costs: what a table says between its points, and how steps that run refine it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.costs import CostTable, StepCosts, fixed_costs

TABLE = CostTable(256, ((1, 0.010), (4, 0.013), (16, 0.025)), 8, ((1, 0.020), (4, 0.050)), slot=1e-6, row_slot=2e-7)


def engine_seconds(costs: StepCosts, rows: int, requests: int = 1, visible: int | None = None) -> float:
    """Without the Python code around a call."""
    return costs.seconds(rows, requests, visible) - requests * (5e-5 + (1e-4 + 8e-6 * (rows - 1) if rows > 1 else 0))


@pytest.mark.parametrize(
    ("rows", "requests", "visible", "seconds"),
    [
        (1, 1, None, 0.010),
        (2, 1, None, 0.011),
        (16, 1, None, 0.025),
        (28, 1, None, 0.037),  # the last slope goes on
        (1, 8, None, 0.020),
        (4, 8, None, 0.050),
        (1, 1, 1256, 0.011),
        (11, 1, 1256, 0.020 + 0.003),
        (1, 1, 0, 0.010 - 128e-6),
    ],
)
def test_a_table_is_read_between_its_points(rows: int, requests: int, visible: int | None, seconds: float) -> None:
    assert engine_seconds(StepCosts(TABLE), rows, requests, visible) == pytest.approx(seconds)


def test_fewer_requests_than_were_measured_lie_between() -> None:
    costs = StepCosts(TABLE)
    assert engine_seconds(costs, 4) < engine_seconds(costs, 1, 4) < engine_seconds(costs, 1, 8)


def test_fixed_costs_are_a_line_that_no_step_moves() -> None:
    costs = fixed_costs(0.08)
    assert [costs.seconds(rows) for rows in (1, 2, 36)] == pytest.approx([1.0, 1.08, 3.8])
    costs.observe(1, 1, 64, 100.0)
    costs.observe_outside(1, 1, 100.0)
    assert costs.seconds(1) == 1.0


def test_those_who_share_a_step_pay_a_part_of_it() -> None:
    costs = fixed_costs(0.1)
    assert costs.curve(3) == pytest.approx([1.0, 1.1, 1.2])
    assert costs.curve(3, threads=2) == pytest.approx([1.1 / 2, 1.3 / 2, 1.5 / 2])
    assert costs.curve(2, requests=4) == pytest.approx([1.3 / 4, 1.7 / 4])


def test_steps_that_take_longer_move_the_points_beside_them() -> None:
    costs = StepCosts(TABLE)
    for step in range(32_000):
        costs.observe(*((1, 1, 256, 0.010), (4, 1, 256, 0.026))[step // 8 % 2])
    assert engine_seconds(costs, 1) == pytest.approx(0.010, rel=0.05)
    assert engine_seconds(costs, 4) == pytest.approx(0.026, rel=0.05)
    assert costs.version > 0


def test_a_machine_that_slows_down_changes_no_ratio_by_much() -> None:
    costs = StepCosts(TABLE)
    for _ in range(16_000):
        costs.observe(1, 1, 256, 0.020)
    assert engine_seconds(costs, 1) == pytest.approx(0.020, rel=0.02)
    assert engine_seconds(costs, 16) / engine_seconds(costs, 1) == pytest.approx(2.5, rel=0.2)


def test_one_disturbed_step_is_not_believed() -> None:
    costs = StepCosts(TABLE)
    for _ in range(8):
        costs.observe(4, 1, 256, 10.0)  # one of eight is looked at
    assert engine_seconds(costs, 4) < 0.013 * 1.05


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(0, 4096), st.floats(0, 1e3)), max_size=60))
def test_costs_stay_numbers_whatever_is_observed(steps: list[tuple[int, int, int, float]]) -> None:
    costs = StepCosts(TABLE)
    for rows, requests, visible, seconds in steps:
        costs.observe(rows, requests, visible, seconds)
        costs.observe_outside(rows, requests, seconds)
    curve = costs.curve(24, 2, 2, 1024)
    assert curve == sorted(curve)
    assert all(math.isfinite(time) and time > 0 for time in curve)
    assert 1 <= costs.call_rows <= 1024


@pytest.mark.parametrize(
    "values",
    [
        {"single": ()},
        {"single": ((0, 1.0),)},
        {"single": ((4, 1.0), (1, 1.0))},
        {"single": ((1, 1.0), (1, 1.0))},
        {"single": ((1, 0.0),)},
        {"single": ((1, math.nan),)},
        {"single": ((1, math.inf),)},
        {"single": ((1, 1e308), (2, 1.7e308))},  # a wider call would take forever
        {"single": ((1, 5e-324),)},
        {"single": ((1, 1.0),), "row_slot": 1e300},
        {"single": ((1, 1.0),), "slot": -1.0},
        {"single": ((1, 1.0),), "requests": 0},
    ],
)
def test_a_table_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step costs"):
        CostTable(256, **values)  # type: ignore[arg-type]


def test_the_python_code_of_plain_and_of_wide_steps_is_learned_apart() -> None:
    costs = StepCosts(TABLE)
    for _ in range(200):
        costs.observe_outside(1, 2, 2e-4)
        costs.observe_outside(5, 2, 2 * (1e-4 + 2e-4 + 4 * 8e-6))
    assert costs.seconds(1, 1) == pytest.approx(0.010 + 1e-4, rel=1e-3)
    assert costs.seconds(4, 1) == pytest.approx(0.013 + 1e-4 + 2e-4 + 3 * 8e-6, rel=1e-3)


def test_plans_are_made_again_when_calls_of_several_requests_cost_other_than_measured() -> None:
    costs = StepCosts(TABLE)
    for step in range(32_000):
        costs.observe(*((1, 8, 256, 0.020), (4, 8, 256, 0.030))[step // 8 % 2])
    assert costs.version > 0


def test_plans_are_made_again_when_the_python_code_takes_longer_than_expected() -> None:
    costs = StepCosts(CostTable(256, ((1, 2e-4), (4, 2.6e-4))))
    for _ in range(200):
        costs.observe(4, 1, 256, 2.6e-4)
        costs.observe_outside(4, 1, 6e-4)
    assert costs.version > 0


def test_fewer_visible_slots_never_save_a_whole_step() -> None:
    costs = StepCosts(CostTable(1024, ((1, 0.010),), slot=2e-5))
    assert engine_seconds(costs, 1, 1, 0) == pytest.approx(0.002)
