"""Planning: the drafts that costs and acceptance rates imply."""

from __future__ import annotations

import pytest

from spaceport.runtime.costs import CostTable, StepCosts, fixed_costs
from spaceport.tools.bench.planning import drafts_of, rows_of

# Of the 1.2B float32 model of docs/decoding.md: seconds by rows.
LARGE = StepCosts(
    CostTable(0, ((1, 1.0), (2, 1.13), (4, 1.22), (9, 1.64), (16, 2.45), (36, 5.0), (64, 8.6))), fixed=True
)


def test_rows_have_the_times_of_the_table() -> None:
    found = rows_of(fixed_costs(0.1), 1, 256)
    assert [(each.rows, each.ratio) for each in found[:3]] == [
        (1, 1.0),
        (2, pytest.approx(1.1)),
        (4, pytest.approx(1.3)),
    ]
    assert found[0].milliseconds == 1000


def test_a_request_that_shares_a_step_with_others_gets_fewer_rows() -> None:
    alone, shared = (drafts_of(fixed_costs(0.2), (0.6,), 5, requests, 64) for requests in (1, 8))
    assert alone.speedup > shared.speedup
    assert alone.steps[-1].rows > shared.steps[-1].rows


def test_expensive_rows_alternate_between_drafting_and_verifying() -> None:
    found = drafts_of(LARGE, (0.79,), 5, 1, 256)
    assert found.speedup == pytest.approx(1.717, abs=0.01)
    assert found.steps[0].masks in ((4,), (5,))  # the fifth one is worth next to nothing
    assert len(found.steps[5].masks) - 1 == 5
    assert sum(found.steps[5].masks) < 5


def test_nearly_free_rows_fill_the_step() -> None:
    found = drafts_of(fixed_costs(0.001), (0.79,), 5, 1, 256)
    assert min(found.steps[5].masks) == 5
    assert found.speedup > 3.3


def test_drafts_that_do_not_pay_are_plain_steps() -> None:
    found = drafts_of(fixed_costs(1.0), (0.3,), 3, 1, 64)
    assert (found.speedup, found.tokens_per_step) == (pytest.approx(1.0), pytest.approx(1.0))
    assert [step.rows for step in found.steps] == [1] * 4


def test_rates_by_depth_are_taken_as_given_and_the_last_one_goes_on() -> None:
    assert drafts_of(fixed_costs(0.1), (0.9, 0.5), 4, 1, 64).acceptance == (0.9, 0.5, 0.5, 0.5)


def test_tokens_per_step_and_speed_up_fit_together() -> None:
    """In a step that is always the same they differ by its time."""
    found = drafts_of(fixed_costs(0.0), (1.0,), 2, 1, 64)
    assert found.tokens_per_step == pytest.approx(3, abs=0.05)
    assert found.speedup == pytest.approx(3, abs=0.01)
