"""Drafts: the chain, and configurations that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import DraftConfig, chain

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


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 30), st.integers(1, 99))
def test_no_chain_has_more_rows_than_it_may(count: int, mask_slots: int, remaining: int, rows: int) -> None:
    draft = chain(range(count), mask_slots, remaining, rows)
    assert 1 + len(draft.tokens) + sum(draft.masks) <= rows
    assert draft.sources == ("mask",) * len(draft.tokens)


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
