"""The budget: whatever is accepted, drafts cost no more than they may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.decode.budget import CREDIT, SHARE, DraftBudget, PlanningPause

TIMES = st.lists(st.floats(0, 2), min_size=1, max_size=30).map(
    lambda more: [1 + sum(more[:n]) for n in range(len(more))]
)


@given(TIMES, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39)), max_size=200))
def test_drafts_never_lose_more_than_a_share_and_the_credit(times: list[float], steps: list[tuple[int, int]]) -> None:
    """Any wish for rows, any number of accepted tokens."""
    budget, spent, tokens = DraftBudget(), 0.0, 0
    for wished, accepted in steps:
        rows = min(wished, budget.rows(times))
        written = 1 + min(accepted, rows - 1)
        budget.spend(times[rows - 1], written)
        spent, tokens = spent + times[rows - 1], tokens + written
        assert spent <= (1 + SHARE) * tokens + CREDIT + 1e-9


def test_mask_slots_rest_when_little_is_left_and_are_tried_again() -> None:
    budget = DraftBudget()
    assert budget.allows_masks
    budget.spend(1 + CREDIT, 1)
    plain = 0
    while not budget.allows_masks:
        budget.spend(1.0, 1)
        plain += 1
    assert plain == pytest.approx((0.6 - SHARE) / SHARE, abs=1)
    budget.spend(1.2, 1)
    assert budget.allows_masks  # not before less than 0.3 is left


def test_tokens_that_are_at_hand_are_verified_with_what_is_left() -> None:
    budget = DraftBudget()
    budget.spend(1 + CREDIT - 0.2, 1)
    assert not budget.allows_masks
    assert budget.rows([1.0, 1.1, 1.2, 1.3]) == 3


def test_what_drafts_saved_may_be_spent_again() -> None:
    budget = DraftBudget()
    budget.spend(1 + CREDIT, 1)
    budget.spend(2.0, 6)
    assert budget.rows([1.0, 3.0, 5.0, 9.0]) == 3


def test_a_pause_doubles_with_each_empty_plan_and_ends_with_the_first_draft() -> None:
    pause, pauses = PlanningPause(), []
    for rows in (1, 1, 1, 1, 1, 1, 5, 1):
        pause.planned(rows, plain_seconds=1e-4)
        pauses.append(pause.remaining)
        while pause.remaining:
            pause.skip()
    assert pauses == [1, 2, 4, 8, 16, 16, 0, 1]


@pytest.mark.parametrize(("plain_seconds", "longest"), [(1e-3, 10), (5e-3, 2), (2e-2, 0), (1.0, 0)])
def test_pauses_are_short_where_steps_are_long(plain_seconds: float, longest: int) -> None:
    pause = PlanningPause()
    for _ in range(8):
        pause.planned(1, plain_seconds)
    assert pause.remaining == longest
    for _ in range(longest):
        pause.skip()
    assert (pause.remaining, pause.take_skipped()) == (0, longest)
    assert pause.take_skipped() == 0
