"""Drafts: the chain, and configurations that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.runtime.decode.draft import Draft, DraftConfig, chain

WIDE = 99  # more tokens than anything needs


@pytest.mark.parametrize(
    ("rows", "tokens", "mask_slots"),
    [
        (None, 3, 3),
        (16, 3, 3),
        (15, 3, 2),
        (12, 3, 2),
        (8, 3, 1),
        (7, 3, 0),
        (4, 3, 0),
        (3, 2, 0),
        (1, 0, 0),
    ],
)
def test_a_chain_keeps_to_its_rows_with_fewer_mask_slots_first(rows: int | None, tokens: int, mask_slots: int) -> None:
    draft = chain((7, 8, 9), 3, WIDE, rows)
    assert draft.tokens == (7, 8, 9)[:tokens]
    assert draft.masks == (mask_slots,) * (tokens + 1)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 30), st.integers(1, 99), st.booleans())
def test_no_chain_has_more_rows_than_it_may(
    count: int, mask_slots: int, remaining: int, rows: int, shift: bool
) -> None:
    draft = chain(range(count), mask_slots, remaining, rows, MaskLayout(shift))
    groups = 0 if shift else len(draft.masks) - draft.masks.count(0)
    assert 1 + len(draft.tokens) + sum(draft.masks) + groups == draft.rows <= rows
    assert draft.sources == ("mask",) * len(draft.tokens)


@pytest.mark.parametrize(
    ("rows", "tokens", "masks"),
    [
        (8, (5, 6), (2, 0, 1)),
        (7, (5, 6), (1, 0, 1)),
        (6, (5, 6), (0, 0, 1)),  # the first group has lost its only mask slot, so it needs no other row either
        (5, (5, 6), (0, 0, 1)),
        (4, (5, 6), (0, 0, 0)),
        (3, (5, 6), (0, 0, 0)),
        (2, (5,), (0, 0)),
        (1, (), (0,)),
    ],
)
def test_a_cut_group_without_shift_keeps_the_row_that_leads_it(
    rows: int, tokens: tuple[int, ...], masks: tuple[int, ...]
) -> None:
    order = (-1, -1, 2, 2, 0, 0, 0)  # candidates, the group behind the second, the group behind the last known token
    draft = Draft((5, 6), (0, 1), (2, 0, 1), order=order, mask_layout=MaskLayout(shift=False))
    assert draft.rows == 8
    found = draft.cut(rows, "shared_call")
    assert (found.tokens, found.masks) == (tokens, masks)
    assert found.rows <= rows
    again = draft.cut(min(8, rows + 1), "budget").cut(rows, "shared_call")
    assert (again.tokens, again.masks) == (tokens, masks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "draft rows is 0: expected at least 1"),
        ({"siblings": 0}, "draft siblings is 0: expected at least 1"),
        ({"lookup": -1}, "draft lookup is -1: expected at least 0"),
        ({"shape": "bush"}, "draft shape is 'bush': expected chain or tree"),
    ],
)
def test_a_drafting_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        DraftConfig(**options)  # type: ignore[arg-type]
