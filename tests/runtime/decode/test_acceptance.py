"""Acceptance: what is learned from generated tokens, by source and depth, whether or not they were drafted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spaceport.runtime.decode.acceptance import Acceptance, is_copying
from spaceport.runtime.decode.draft import Candidates


def candidates_of(*tokens: int, probability: float = 0.5) -> tuple[Candidates, ...]:
    """What mask slots predict, one token each."""
    return tuple(Candidates((token,), (probability,)) for token in tokens)


def learned(
    candidates: tuple[Candidates, ...], written: tuple[int, ...], lookup_tokens: int = 0, times: int = 300
) -> Acceptance:
    """What is known after mask slots had the same fate over and over."""
    found = Acceptance()
    for _ in range(times):
        found.learn_masks(candidates, written, lookup_tokens, copying=False)
    return found


@pytest.mark.parametrize(
    ("written", "lookup_tokens", "reach"),
    [
        ((7, 8, 9, 1), 0, [1, 1, 1]),
        ((7, 8, 1), 0, [1, 1, 0]),
        ((7, 1), 0, [1, 0, 0]),  # a wrong one makes those behind it wrong as well
        ((1,), 0, [0, 0, 0]),
        ((7, 8, 9, 1), 1, [1, 1, 0]),  # prompt lookup had the first one as well
        ((7, 8, 9, 1), 3, [0, 0, 0]),
    ],
)
def test_the_reach_is_how_many_tokens_mask_slots_add(
    written: tuple[int, ...], lookup_tokens: int, reach: list[float]
) -> None:
    found = learned(candidates_of(7, 8, 9), written, lookup_tokens)
    assert found.reach(3, copying=False) == pytest.approx(reach, abs=1e-3)


def test_what_a_plain_step_does_not_show_stays_unknown() -> None:
    """One token was written and predicted: of the second nothing is known."""
    found = learned(candidates_of(7, 8), (7,))
    assert found.reach(2, copying=False) == pytest.approx([1, Acceptance().reach(2, copying=False)[1]], abs=1e-3)


def test_a_mask_slot_that_predicts_nothing_ends_the_prediction() -> None:
    """Its tokens may all be banned or too unlikely, while the mask slot behind it is sure of one."""
    candidates = (*candidates_of(7), Candidates((), ()), *candidates_of(8, probability=0.9))
    found = learned(candidates, (7, 8, 1))
    assert found.reach(3, copying=False) == pytest.approx([1, 0, 0], abs=1e-3)
    assert (len(found.accepted), len(found.promised)) == (1, 1)
    nothing = learned(candidates[1:], (8, 1))
    assert nothing.reach(2, copying=False) == pytest.approx([0, 0], abs=1e-3)


def test_texts_that_are_copied_have_rates_of_their_own() -> None:
    found = Acceptance()
    for _ in range(300):
        found.learn_masks(candidates_of(7, 8), (1,), 0, copying=True)
    assert found.reach(2, copying=True) == pytest.approx([0, 0], abs=1e-3)
    assert found.reach(2, copying=False) == Acceptance().reach(2, copying=False)


def test_depths_without_predictions_slowly_get_their_first_rate_back() -> None:
    first = Acceptance().reach(3, copying=False)
    found = learned(candidates_of(7, 8, 9), (1,))
    after = found.reach(3, copying=False)
    for _ in range(20_000):
        found.learn_masks((), (1,), 0, copying=False)
    assert after == pytest.approx([0, 0, 0], abs=1e-3)
    assert found.reach(3, copying=False) == pytest.approx(first, abs=1e-3)


def test_mask_slots_that_fail_again_and_again_are_tried_less_and_less_often() -> None:
    """The share of its first rate that a depth gets back while it is not used."""
    first = Acceptance().reach(1, copying=False)[0]

    def regained(failures: int) -> float:
        found = learned(candidates_of(7), (1,), times=failures)
        (before,) = found.reach(1, copying=False)
        for _ in range(20):
            found.learn_masks((), (1,), 0, copying=False)
        return (found.reach(1, copying=False)[0] - before) / (first - before)

    assert regained(100) < 0.2 * regained(1)


@pytest.mark.parametrize(
    ("equal", "copied", "kinds"),
    [(2, 0, [0, 1, 2, 2]), (3, 0, [1, 2, 2, 2]), (4, 2, [2, 2, 3, 3]), (4, 14, [3, 3, 4, 4]), (9, 99, [4, 4, 4, 4])],
)
def test_each_looked_up_token_has_the_rate_of_its_match(equal: int, copied: int, kinds: list[int]) -> None:
    found = Acceptance()
    assert found.lookup_probabilities(equal, copied, 4) == [found.lookup[kind] for kind in kinds]


def test_prompt_lookup_is_learned_token_by_token_until_it_is_wrong() -> None:
    found = Acceptance()
    for _ in range(300):
        assert found.learn_lookup((7, 8, 9), (7, 8, 1), 2, 0) == 2
    assert found.lookup[:3] == pytest.approx([1, 1, 0], abs=1e-3)
    assert found.lookup[3:] == Acceptance().lookup[3:]


def test_looked_up_tokens_that_were_not_drafted_are_learned_too() -> None:
    found = Acceptance()
    for _ in range(300):
        assert found.learn_lookup((7, 8, 9), (7,), 4, 0) == 1
    assert found.lookup[2] == pytest.approx(1, abs=1e-3)


def test_a_step_without_lookup_says_nothing_about_it() -> None:
    assert Acceptance().learn_lookup((), (1, 2), 0, 0) == 0
    assert learned(candidates_of(7, 8), (7, 8, 9)).lookup == Acceptance().lookup


def test_trust_is_what_mask_slots_kept_of_what_they_promised_at_each_depth() -> None:
    found = Acceptance()
    for step in range(600):
        found.learn_masks(
            candidates_of(7, 8, probability=0.8), ((7, 8, 1), (7, 1), (1,), (1,))[step % 4], 0, copying=False
        )
    assert found.trust(0) == pytest.approx(0.5 / 0.8, rel=0.25)
    assert found.trust(5) == found.trust(1)


def test_depths_behind_a_wrong_token_say_nothing_about_trust() -> None:
    found = learned(candidates_of(7, 8, probability=0.8), (1, 8))
    assert found.trust(0) == pytest.approx(0.1)
    assert len(found.accepted) == 1


def test_the_first_steps_count_more_than_the_later_ones() -> None:
    found, before = Acceptance(), Acceptance().lookup[0]
    found.learn_lookup((7,), (1,), 2, 0)
    assert found.lookup[0] == pytest.approx(before * 3 / 4)


def test_a_copy_learns_for_itself() -> None:
    shared = Acceptance()
    copy = shared.copy()
    for _ in range(9):
        copy.learn_masks(candidates_of(7), (1,), 0, copying=False)
        copy.learn_lookup((7,), (1,), 2, 0)
    assert shared == Acceptance()
    assert copy.reach(1, copying=False) < shared.reach(1, copying=False)


def test_no_depth_is_rated_better_than_those_before_it() -> None:
    found = Acceptance(masks=([0.4, 0.9, 0.2], []))
    assert found.reach(3, copying=False) == [0.4, 0.4, 0.2]


def test_a_text_is_copied_once_a_few_looked_up_tokens_in_a_row_were_right() -> None:
    assert [is_copying(copied) for copied in (0, 3, 4, 40)] == [False, False, True, True]


def test_a_request_may_begin_while_another_thread_learns_a_new_depth() -> None:
    """Requests are made by the threads of those who ask for them."""

    class Growing(list[float]):
        def __iter__(self) -> Iterator[float]:
            yield from list(super().__iter__())
            shared.promised.append(0.7)
            shared.accepted.append(0.7)

    shared = Acceptance()
    shared.promised, shared.accepted = Growing([0.7]), Growing([0.7])
    started = shared.copy()
    assert started.trust(2) == pytest.approx(1.0)
    started.learn_masks(candidates_of(7, 8, 9), (7, 8, 9, 1), 0, copying=False)
    assert len(started.promised) == len(started.accepted) == 3
