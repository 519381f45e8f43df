"""Step costs: what a table says between its points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.costs import StepCosts, relative_costs

TABLE = StepCosts(256, ((1, 0.010), (4, 0.013), (16, 0.025)), 8, ((1, 0.020), (4, 0.050)), slot=1e-6, row_slot=2e-7)


def engine_seconds(costs: StepCosts, rows: int, requests: int = 1, visible: int | None = None) -> float:
    """Without the Python code around a call."""
    return costs.seconds(rows, requests, visible) - 2 * requests * (
        5e-5 + (1e-4 + 8e-6 * (rows - 1) if rows > 1 else 0)
    )


@pytest.mark.parametrize(
    ("rows", "requests", "visible", "seconds"),
    [
        *((1, 1, None, 0.010), (2, 1, None, 0.011), (16, 1, None, 0.025), (1, 8, None, 0.020), (4, 8, None, 0.050)),
        (28, 1, None, 0.037),  # the last slope goes on
        *((1, 1, 1256, 0.011), (11, 1, 1256, 0.020 + 0.003), (1, 1, 0, 0.010 - 128e-6)),
    ],
)
def test_a_table_is_read_between_its_points(rows: int, requests: int, visible: int | None, seconds: float) -> None:
    assert engine_seconds(TABLE, rows, requests, visible) == pytest.approx(seconds)


def test_fewer_requests_than_were_measured_lie_between() -> None:
    assert engine_seconds(TABLE, 4) < engine_seconds(TABLE, 1, 4) < engine_seconds(TABLE, 1, 8)
    short = StepCosts(1024, ((1, 0.010),), slot=2e-5)
    assert engine_seconds(short, 1, 1, 0) == pytest.approx(0.002)  # fewer visible slots never save a whole step


def test_a_curve_is_relative_to_the_plain_step_of_all_who_share_it() -> None:
    costs = relative_costs(0.1)  # a line without Python code
    assert [costs.seconds(rows) for rows in (1, 2, 36)] == pytest.approx([1.0, 1.1, 4.5])
    assert costs.curve(3).times == pytest.approx([1.0, 1.1, 1.2])
    assert costs.curve(3, threads=2).times == pytest.approx([1.0, 1.3 / 1.1, 1.5 / 1.1])
    assert costs.curve(2, requests=4).times == pytest.approx([1.0, 1.7 / 1.3])


@pytest.mark.parametrize(
    "values",
    [
        *({"single": single} for single in ((), ((0, 1.0),), ((4, 1.0), (1, 1.0)), ((1, 1.0), (1, 1.0)), ((1, 0.0),))),
        *({"single": single} for single in (((1, math.nan),), ((1, 1e308), (2, 1.7e308)), ((1, 5e-324),))),
        *({"single": ((1, 1.0),), **wrong} for wrong in ({"row_slot": 1e300}, {"slot": -1.0}, {"requests": 0})),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step costs"):
        StepCosts(256, **values)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4096))
def test_curves_rise_from_a_plain_step(most: int, threads: int, requests: int, visible: int) -> None:
    curve = TABLE.curve(most, threads, requests, visible)
    assert curve.times[0] == 1
    assert list(curve.times) == sorted(curve.times)
    assert len(curve.times) == most
    assert 0 <= curve.least == min(curve.slopes)


def test_planning_takes_longer_relative_to_a_short_step() -> None:
    short, long = (StepCosts(256, ((1, seconds), (4, 1.2 * seconds))).curve(4) for seconds in (2e-4, 2e-2))
    assert short.planning > 0.1
    assert long.planning < 0.01
    assert short.times[1] > 1 + short.planning  # a draft was planned
    assert relative_costs(0.1).curve(4).planning == 0
