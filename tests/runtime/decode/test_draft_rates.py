"""Rates: what is learned from the fate of drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spaceport.runtime.decode.draft import Draft, Rates, Source


def rates(*masks: float, lookup: float = 0.5) -> Rates:
    """Mask slots that are as right as they say, and steps that write a token with a row."""
    return Rates(list(masks), lookup, tokens=1.0, rows=1.0, promised=1.0, kept=1.0)


def heard(found: Rates, draft: Draft, guesses: int, *accepted: int, times: int = 300) -> Rates:
    """The rates after a draft had the same fate over and over."""
    for _ in range(times):
        found.heard(draft, guesses, accepted)
    return found


def line_of(*sources: Source) -> Draft:
    """A line of candidates with a mask slot behind the last known token."""
    count = len(sources)
    return Draft(tuple(range(count)), tuple(range(count)), (1,) + (0,) * count, sources, (0.5,) * count)


def test_the_rate_of_a_place_is_how_often_all_up_to_it_were_right() -> None:
    found = heard(rates(0.5, 0.5, 0.5), line_of("mask", "mask", "mask"), 3, 1, 2)
    assert found.masks == pytest.approx([1, 1, 0], abs=1e-3)


def test_a_guess_that_was_not_worth_a_row_counts_as_wrong() -> None:
    found = heard(rates(0.5, 0.5), line_of("mask"), 2, 1)
    assert found.masks == pytest.approx([1, 0], abs=1e-3)


def test_places_that_nothing_was_guessed_for_are_slowly_forgotten() -> None:
    found = Rates()
    first = found.of(3)
    found.masks = [0.0, 0.0, 0.0]
    heard(found, line_of("mask"), 1, 1, times=1)
    assert 0 < found.masks[1] < 0.2 * first[1]
    heard(found, line_of("mask"), 1, 1, times=2000)
    assert found.masks[1:] == pytest.approx(first[1:], abs=1e-3)


@pytest.mark.parametrize(
    ("sources", "accepted", "rate"),
    [
        (("lookup", "lookup"), (1, 2), 1.0),
        (("lookup", "both"), (1, 2), 1.0),
        (("lookup", "lookup", "lookup"), (), 0.0),
        (("mask", "mask"), (1, 2), 0.5),  # nothing was looked up
    ],
)
def test_the_rate_of_look_ups_is_how_often_one_was_right_behind_one_that_was(
    sources: tuple[Source, ...], accepted: tuple[int, ...], rate: float
) -> None:
    assert heard(rates(), line_of(*sources), 0, *accepted).lookup == pytest.approx(rate, abs=1e-3)


def test_a_look_up_behind_a_rejected_one_was_not_tried() -> None:
    once = heard(rates(), line_of("lookup", "lookup", "lookup"), 0, times=1)
    assert once.lookup == heard(rates(), line_of("lookup"), 0, times=1).lookup
    more = heard(rates(), line_of("lookup", "lookup", "lookup"), 0, 1, times=1)  # right, wrong, not tried
    assert once.lookup < more.lookup < heard(rates(), line_of("lookup"), 0, 1, times=1).lookup


def test_the_trust_in_mask_slots_is_what_they_kept_of_what_they_promised() -> None:
    found = heard(rates(), Draft((7, 8), (0, 0), (0, 0, 0), ("mask", "mask"), (0.5, 0.3)), 1, times=40)
    assert found.trust < 0.2
    found = heard(found, Draft((7, 8), (0, 0), (0, 0, 0), ("mask", "mask"), (0.5, 0.3)), 1, 2)
    assert found.trust == 1.0


def test_a_promise_is_that_of_the_first_candidates_as_the_mask_slots_made_it() -> None:
    found = rates()
    for time in range(400):
        odds = (0.6 * found.trust, 0.2 * found.trust, 0.3)  # two for the first place, one behind the first of them
        draft = Draft((7, 8, 9), (0, 0, 1), (0, 0, 0, 0), ("mask", "both", "mask"), odds)
        found.heard(draft, 2, (1 + time % 2,) if time % 4 else ())
    assert found.promised == pytest.approx(0.8)
    assert found.kept == pytest.approx(0.75, abs=0.1)


def test_look_ups_say_nothing_of_the_trust_in_mask_slots() -> None:
    found = replace(rates(), kept=0.5)
    assert heard(found, line_of("lookup", "lookup"), 0, 1).trust == 0.5


def test_a_row_has_to_promise_as_much_as_its_time_is_worth() -> None:
    """Four tokens in a step of eleven rows, which takes twice as long as one of a row."""
    assert replace(rates(), tokens=4.0, rows=11.0).worth(0.1) == pytest.approx(0.1 * 4 / 2)
    assert rates().worth(0.1) == 0.1
    assert replace(rates(), tokens=1.0, rows=11.0).worth(0.1) == 0.1  # never less than a step of a row
    found = heard(rates(), line_of("mask", "mask", "mask"), 3, 1, 2)
    assert (found.tokens, found.rows) == pytest.approx((3, 5))


def test_no_mask_slot_is_promised_more_than_those_before_it() -> None:
    assert rates(0.5, 0.8, 0.2, 0.3).of(4) == [0.5, 0.5, 0.2, 0.2]


def test_rates_begin_between_always_and_never_and_fall_with_the_place() -> None:
    found = Rates().of(5)
    assert 0 < found[4] < found[0] < 1
    assert found == sorted(found, reverse=True)
