"""Acceptance: what is learned from generated tokens, by source and depth, whether or not they were drafted."""

from __future__ import annotations

import pytest

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance, is_copying
from spaceport.runtime.decode.acceptance import Acceptance
from spaceport.runtime.decode.draft import Candidates

FIRST = Acceptance(3).reach(copying=False)


def candidates_of(*tokens: int, probability: float = 0.5) -> tuple[Candidates, ...]:
    """What mask slots predict, one token each."""
    return tuple(Candidates((token,), (probability,)) for token in tokens)


def learned(
    candidates: tuple[Candidates, ...], written: tuple[int, ...], lookup_tokens: int = 0, times: int = 300
) -> Acceptance:
    """What is known after mask slots had the same fate over and over; prompt lookup predicted the first tokens too."""
    acceptance = Acceptance(3)
    for _ in range(times):
        acceptance.learn(written[:lookup_tokens], 2, 0, candidates, written)
    return acceptance


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
    acceptance = learned(candidates_of(7, 8, 9), written, lookup_tokens)
    assert acceptance.reach(copying=False) == pytest.approx(reach, abs=1e-3)


def test_what_a_plain_step_does_not_show_stays_unknown() -> None:
    """One token was written and predicted: of the second nothing is known."""
    assert learned(candidates_of(7, 8), (7,)).reach(copying=False) == pytest.approx([1, *FIRST[1:]], abs=1e-3)


def test_a_mask_slot_that_predicts_nothing_ends_the_prediction() -> None:
    """Its tokens may all be banned or too unlikely, while the mask slot behind it is sure of one."""
    candidates = (*candidates_of(7), Candidates((), ()), *candidates_of(8, probability=0.9))
    acceptance = learned(candidates, (7, 8, 1))
    assert acceptance.reach(copying=False) == pytest.approx([1, 0, 0], abs=1e-3)
    assert acceptance.trust(2) == Acceptance(3).trust(2)
    assert learned(candidates[1:], (8, 1)).reach(copying=False)[:2] == pytest.approx([0, 0], abs=1e-3)


def test_texts_that_are_copied_have_rates_of_their_own() -> None:
    acceptance = Acceptance(2)
    for _ in range(300):
        acceptance.learn((), 2, 9, candidates_of(7, 8), (1,))
    assert acceptance.reach(copying=True) == pytest.approx([0, 0], abs=1e-3)
    assert acceptance.reach(copying=False) == FIRST[:2]


def test_depths_without_predictions_slowly_get_their_first_rate_back() -> None:
    acceptance = learned(candidates_of(7, 8, 9), (1,))
    assert acceptance.reach(copying=False) == pytest.approx([0, 0, 0], abs=1e-3)
    for _ in range(100):
        acceptance.learn((), 0, 0, (), (1,))
    assert 0.15 < acceptance.reach(copying=False)[0] < 0.25  # of 0.7
    for _ in range(5000):
        acceptance.learn((), 0, 0, (), (1,))
    assert acceptance.reach(copying=False) == pytest.approx(FIRST, abs=1e-3)


def test_a_bundle_brings_rates_that_are_retried_at_its_own_level() -> None:
    measured = DraftAcceptance((0.5, 0.2), (0.1, 0.2, 0.3, 0.4, 0.5))
    acceptance = Acceptance(3, measured)
    assert acceptance.reach(copying=False) == acceptance.reach(copying=True) == [0.5, 0.2, 0.2]
    assert acceptance.lookup_probabilities(2, 0, 3) == [0.1, 0.2, 0.3]
    for fate in ((candidates_of(7, 8, 9), 300), ((), 5000)):
        for _ in range(fate[1]):
            acceptance.learn((), 0, 0, fate[0], (1,))
    assert acceptance.reach(copying=False) == pytest.approx([0.5, 0.2, 0.2], abs=1e-3)


@pytest.mark.parametrize(
    ("equal", "copied", "kinds"),
    [(2, 0, [0, 1, 2, 2]), (3, 0, [1, 2, 2, 2]), (4, 2, [2, 2, 3, 3]), (4, 14, [3, 3, 4, 4]), (9, 99, [4, 4, 4, 4])],
)
def test_each_looked_up_token_has_the_rate_of_its_match(equal: int, copied: int, kinds: list[int]) -> None:
    acceptance = Acceptance(0)
    assert acceptance.lookup_probabilities(equal, copied, 4) == [acceptance.lookup[kind] for kind in kinds]


def test_prompt_lookup_is_learned_token_by_token_until_it_is_wrong() -> None:
    acceptance = Acceptance(0)
    for _ in range(300):
        assert acceptance.learn((7, 8, 9), 2, 0, (), (7, 8, 1)) == 2
    assert acceptance.lookup[:3] == pytest.approx([1, 1, 0], abs=1e-3)
    assert acceptance.lookup[3:] == Acceptance(0).lookup[3:]


def test_looked_up_tokens_that_were_not_drafted_are_learned_too() -> None:
    acceptance = Acceptance(0)
    for _ in range(300):
        assert acceptance.learn((7, 8, 9), 4, 0, (), (7,)) == 1
    assert acceptance.lookup[2] == pytest.approx(1, abs=1e-3)


def test_a_step_without_lookup_says_nothing_about_it() -> None:
    assert Acceptance(0).learn((), 0, 0, (), (1, 2)) == 0
    assert learned(candidates_of(7, 8), (7, 8, 9)).lookup == Acceptance(3).lookup


def test_trust_is_what_mask_slots_kept_of_what_they_promised_at_each_depth() -> None:
    acceptance = Acceptance(3)
    for step in range(600):
        written = ((7, 8, 1), (7, 1), (1,), (1,))[step % 4]
        acceptance.learn((), 0, 0, candidates_of(7, 8, probability=0.8), written)
    assert acceptance.trust(0) == pytest.approx(0.5 / 0.8, rel=0.25)
    assert acceptance.trust(2) == 1.0


def test_depths_behind_a_wrong_token_say_nothing_about_trust() -> None:
    acceptance = learned(candidates_of(7, 8, probability=0.8), (1, 8))
    assert acceptance.trust(0) == pytest.approx(0.1)
    assert acceptance.trust(1) == 1.0


def test_the_first_steps_count_more_than_the_later_ones() -> None:
    acceptance, before = Acceptance(0), Acceptance(0).lookup[0]
    acceptance.learn((7,), 2, 0, (), (1,))
    assert acceptance.lookup[0] == pytest.approx(before * 4 / 5)


def test_a_copy_learns_for_itself_and_starts_half_way_back() -> None:
    shared = learned(candidates_of(7, 8, 9), (1,))
    before = shared.reach(copying=False)
    copy = shared.copy()
    assert copy.reach(copying=False) == pytest.approx([rate / 2 for rate in FIRST], abs=1e-3)
    for _ in range(99):
        copy.learn((7,), 2, 0, candidates_of(7), (7, 1))
    assert shared.reach(copying=False) == before
    shared.follow(copy, 1.0)
    assert shared.reach(copying=False) == copy.reach(copying=False)
    assert shared.lookup == copy.lookup


def test_no_depth_is_rated_better_than_those_before_it() -> None:
    acceptance = Acceptance(3)
    acceptance.masks[0][:] = [0.4, 0.9, 0.2]
    assert acceptance.reach(copying=False) == [0.4, 0.4, 0.2]


def test_a_text_is_copied_once_a_few_looked_up_tokens_in_a_row_were_right() -> None:
    assert [is_copying(copied) for copied in (0, 3, 4, 40)] == [False, False, True, True]
