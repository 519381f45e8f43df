"""Which steps share a call of the engine: the fewest rows, those that only fill up and the calls themselves counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.runtime.decode.request import ScheduledStep
from spaceport.runtime.decode.step import StepInput, plan
from spaceport.runtime.scheduling.calls import group_by_width
from support.hash_engine import HashEngine, Language, request_for

CALL = 16  # rows that a call costs before it has any
Widths = dict[int, int]  # index of a request in the engine -> rows that it takes to a step


def steps_of(widths: Widths) -> list[ScheduledStep]:
    engine = HashEngine(Language(1), 300, 0)
    return plan([StepInput(request_for(engine, [1] * rows, 1, 0), index) for index, rows in sorted(widths.items())])


def shared(widths: Widths) -> list[list[int]]:
    return [[step.engine_index for step in call] for call in group_by_width(steps_of(widths), CALL)]


def cost(call: Sequence[int], widths: Widths) -> int:
    return (max(call) - min(call) + 1) * max(widths[index] for index in call) + CALL


@settings(max_examples=300)
@given(widths=st.dictionaries(st.integers(0, 90), st.integers(1, 60), max_size=80))
def test_calls_cost_no_more_than_all_in_one_or_each_on_its_own(widths: Widths) -> None:
    found = shared(widths)
    assert sorted(index for call in found for index in call) == sorted(widths)
    assert all(call == sorted(call) for call in found)
    if widths:
        total = sum(cost(call, widths) for call in found)
        assert total <= cost(list(widths), widths)
        assert total <= sum(cost([index], widths) for index in widths)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ({}, []),
        ({3: 9}, [[3]]),
        ({0: 1, 1: 1, 2: 1, 3: 1}, [[0, 1, 2, 3]]),
        ({0: 9, 1: 1, 2: 9, 3: 1}, [[0, 1, 2, 3]]),  # two calls: 3 x 1 + 3 x 9 + 32 = 62 rows, one: 4 x 9 + 16 = 52
        ({0: 36, 1: 36, 2: 1, 3: 1}, [[2, 3], [0, 1]]),  # one call: 160 rows, two: 106
        ({0: 200, 1: 1}, [[1], [0]]),
        ({0: 17, 1: 1}, [[0, 1]]),  # 50 rows either way: then the one call
        ({0: 18, 1: 1}, [[1], [0]]),
        ({0: 1, 17: 1}, [[0, 17]]),  # 34 rows either way
        ({0: 1, 18: 1}, [[0], [18]]),  # nobody between them takes part
        # three or four rows each: it would never begin if it were put together one by one
        ({0: 3, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 3}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({0: 1, 1: 1, 2: 1, 3: 60, 4: 60, 5: 90}, [[0, 1, 2], [3, 4], [5]]),
    ],
)
def test_steps_of_like_width_share_a_call(widths: Widths, expected: list[list[int]]) -> None:
    assert shared(widths) == expected


def test_where_calls_are_dear_they_are_shared() -> None:
    """On a GPU one more call takes as long as hundreds of rows."""
    steps = steps_of({0: 1, 1: 1, 2: 40, 3: 40})
    assert len(group_by_width(steps, CALL)) == 2
    assert len(group_by_width(steps, 200)) == 1
