"""Course: each epoch has the samples that it is to have, and a step is the same whenever it is asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.course import Course
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings

FORKED, FLAT, WHOLE = 1000, 2000, 3000  # first tokens, which tell the samples' kinds and numbers


def sample(first: int, number: int) -> Sample:
    ids = np.array([first + number, *range(1, 4 + number % 5)])
    return Sample(number, ids, np.arange(ids.size) - 1, np.arange(ids.size) > 0)


def prepared(forked: int, whole: int) -> Prepared:
    return Prepared(
        forked=[sample(FORKED, number) for number in range(forked)],
        unforked=[sample(FLAT, number) for number in range(forked)],
        whole=[sample(WHOLE, number) for number in range(whole)],
    )


def epoch(course: Course, number: int) -> Counter[int]:
    """The first tokens of an epoch's rows."""
    steps = range(number * course.epoch_steps, (number + 1) * course.epoch_steps)
    return Counter(int(row.ids[0]) for step in steps for row in course.rows(step))


def kinds(found: Counter[int]) -> list[int]:
    """How many rows of an epoch are forked, in one line though they could fork, and never forked."""
    return [
        sum(count for token, count in found.items() if token // 1000 * 1000 == kind) for kind in (FORKED, FLAT, WHOLE)
    ]


def test_an_epoch_has_every_sample_once_and_the_next_one_in_another_order() -> None:
    course = Course(prepared(0, 23), TrainingSettings("apar", batch=5, epochs=2), ())
    assert (course.samples, course.epoch_steps, course.steps) == (23, 5, 10)
    assert epoch(course, 0) == epoch(course, 1) == Counter(range(WHOLE, WHOLE + 23))
    orders = [[int(row.ids[0]) for step in steps for row in course.rows(step)] for steps in (range(5), range(5, 10))]
    assert orders[0] != orders[1]


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    settings = TrainingSettings("both", batch=4, epochs=3, anchors=2)
    one, other = Course(prepared(9, 9), settings, (90,)), Course(prepared(9, 9), settings, (90,))
    there = [one.rows(step) for step in range(one.steps)]
    back = [other.rows(step) for step in reversed(range(other.steps))][::-1]
    for rows, again in zip(there, back, strict=True):
        assert [row.ids.tolist() for row in rows] == [row.ids.tolist() for row in again]
        assert [row.parents.tolist() for row in rows] == [row.parents.tolist() for row in again]


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.3, 40, 80), (1.0, 200, 200)])
def test_some_forked_answers_are_learned_in_one_line_and_others_in_the_next_epoch(
    rate: float, least: int, most: int
) -> None:
    course = Course(prepared(200, 10), TrainingSettings("apar", batch=30, whole_rate=rate), ())
    found = [epoch(course, number) for number in range(2)]
    for one in found:
        forked, flat, whole = kinds(one)
        assert (forked + flat, whole) == (200, 10)
        assert least <= flat <= most
        assert {token % 1000 for token in one if token < WHOLE} == set(range(200))
    assert (found[0] == found[1]) == (rate in (0.0, 1.0))


@pytest.mark.parametrize(
    ("share", "forked", "whole"),
    [(None, 20, 60), (0.5, 20, 20), (0.2, 20, 5), (0.9, 20, 60), (0.0, 20, 0), (1.0, 0, 60)],
)
def test_the_share_of_what_does_not_fork_is_kept(share: float | None, forked: int, whole: int) -> None:
    course = Course(prepared(20, 60), TrainingSettings("apar", batch=7, unforked_share=share, whole_rate=0.0), ())
    assert kinds(epoch(course, 0)) == [forked, 0, whole]


def test_steps_end_with_the_epochs_or_before() -> None:
    for epochs, most, steps in ((1.5, None, 8), (1.5, 3, 3), (0.1, None, 1), (1.0, 100, 5)):
        settings = TrainingSettings("apar", batch=4, epochs=epochs, max_steps=most)
        assert Course(prepared(0, 20), settings, ()).steps == steps


def test_nothing_to_learn_is_told() -> None:
    with pytest.raises(InputFault, match="nothing to learn"):
        Course(prepared(0, 0), TrainingSettings("apar"), ())
