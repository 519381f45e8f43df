"""Drafts: which rows chains and trees have, in which order they come, and what is left of a draft that is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.runtime.costs import Curve
from spaceport.runtime.decode.draft import (
    MOST_LIKELY,
    Candidates,
    Draft,
    DraftConfig,
    Outlook,
    Proposal,
    Ranked,
    chain,
    tree,
)
from spaceport.runtime.decode.plan import lay_out
from spaceport.runtime.decode.sources import Predictions

WIDE = 99  # more tokens, or rows, than anything needs
PLAN = DraftConfig(siblings=2)
NO_SHIFT = MaskLayout(shift=False)


@pytest.mark.parametrize(
    ("rows", "remaining", "tokens", "masks"),
    [
        # the rows end: fewer mask slots first
        *((rows, WIDE, (7, 8, 9), (3, 3, 3, 3)) for rows in (None, 16)),
        *((rows, WIDE, (7, 8, 9), (2, 2, 2, 2)) for rows in (15, 12)),
        (8, WIDE, (7, 8, 9), (1, 1, 1, 1)),
        *((rows, WIDE, (7, 8, 9), (0, 0, 0, 0)) for rows in (7, 4)),
        (3, WIDE, (7, 8), (0, 0, 0)),
        (1, WIDE, (), (0,)),
        # the tokens end
        (None, 1, (), (0,)),  # one token left: the last known one writes it
        (None, 2, (7,), (0, 0)),
        (None, 3, (7, 8), (1, 0, 0)),
        (None, 4, (7, 8, 9), (2, 1, 0, 0)),
        (None, 5, (7, 8, 9), (3, 2, 1, 0)),
    ],
)
def test_a_chain_keeps_to_its_rows_and_to_the_token_limit(
    rows: int | None, remaining: int, tokens: tuple[int, ...], masks: tuple[int, ...]
) -> None:
    found = chain((7, 8, 9), 3, remaining, rows)
    assert (found.tokens, found.parents, found.masks) == (tokens, tuple(range(len(tokens))), masks)


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
    draft = Draft((5, 6), (0, 1), (2, 0, 1), order=order, mask_layout=NO_SHIFT)
    assert draft.rows == 8
    found = draft.cut(rows, "shared_call")
    assert (found.tokens, found.masks) == (tokens, masks)
    assert (found.rows <= rows, found.limited) == (True, "shared_call" if rows < 8 else None)
    again = draft.cut(min(8, rows + 1), "budget").cut(rows, "shared_call")
    assert (again.tokens, again.masks) == (tokens, masks)


def linear(row: float) -> Curve:
    """Each further row costs the same."""
    return Curve([1 + row * more for more in range(WIDE)])


def outlook(*masks: float, row: float = 0.1) -> Outlook:
    """A row has to be worth `row` tokens; mask slots are right as often as `masks` says and cost a row later."""
    gains = tuple(max(0.0, rate - row) for rate in (*masks, *(0.0,) * 6))
    return Outlook(linear(row), 1.0, gains)


@dataclass(frozen=True)
class Line:
    """A source that proposes one token at each depth."""

    tokens: Sequence[int]
    probability: float = 0.5
    source: str = "lookup"
    anywhere: bool = False

    @property
    def depths(self) -> int:
        return len(self.tokens)

    def behind(self, depth: int, token: int) -> Ranked:
        return ((min(MOST_LIKELY, self.probability), self.tokens[depth]),)


def predicted(*candidates: Candidates) -> Predictions:
    """What mask slots propose."""
    return Predictions("mask", candidates, 0)


def candidate(**probability_of: float) -> Candidates:
    """Candidates with tokens named t10 and so on."""
    return Candidates(tuple(int(name[1:]) for name in probability_of), tuple(probability_of.values()))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The way of tokens to each candidate."""
    ways: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        ways.append((*ways[parent], token))
    return ways[1:]


def chances(draft: Draft) -> list[float]:
    """The estimated probability of each candidate that it is accepted: the tokens that its row is expected to add."""
    return [
        worth - before for node, (before, worth) in zip(draft.order, pairwise(draft.worth), strict=True) if node < 0
    ]


CANDIDATES = predicted(candidate(t10=0.6, t11=0.28), candidate(t20=0.5, t21=0.4))
BEST_FIRST = [
    (10,),  # 0.6
    (10, 20),  # 0.6 x 0.5 = 0.3
    (11,),  # 0.28
    (10, 21),  # 0.24
    (11, 20),  # 0.14
    (11, 21),  # 0.112
]


@pytest.mark.parametrize(
    ("rows", "siblings", "row", "count"),
    [
        *((rows, 2, 0.1, min(rows - 1, 6)) for rows in range(1, 9)),
        *((WIDE, 2, *pair) for pair in ((0.1, 6), (0.12, 5), (0.2, 4), (0.26, 3), (0.29, 2), (0.5, 1), (0.7, 0))),
        (WIDE, 1, 0.1, 2),
        (WIDE, 3, 0.1, 6),
    ],
)
def test_candidates_come_best_first_while_there_are_rows_that_promise_enough(
    rows: int, siblings: int, row: float, count: int
) -> None:
    draft = tree((CANDIDATES,), DraftConfig(siblings=siblings), WIDE, rows, outlook(row=row))
    assert paths(draft) == BEST_FIRST[:count]
    assert chances(draft) == pytest.approx((0.6, 0.3, 0.28, 0.24, 0.14, 0.112)[:count])
    assert draft.sources == ("mask",) * count
    assert draft.masks == (0,) * (1 + count)


def test_of_equal_candidates_the_first_to_come_up_is_the_first() -> None:
    equals = predicted(candidate(t10=0.5, t11=0.25), candidate(t20=0.5))
    assert paths(tree((equals,), PLAN, WIDE, WIDE, outlook()))[:2] == [(10,), (11,)]


@pytest.mark.parametrize(
    ("layout", "rows", "masks"),
    [
        (CAUSAL, 1, (0,)),
        (CAUSAL, 2, (0, 0)),  # the candidate: 0.6
        (
            CAUSAL,
            3,
            (0, 1),
        ),  # a mask slot behind it, right eight times in ten and worth a row of the next step: 0.6 x 0.7
        (CAUSAL, 4, (1, 1)),  # behind the last known token, if the candidate is rejected: 0.4 x 0.7
        (CAUSAL, 5, (1, 2)),  # 0.6 x 0.4
        (CAUSAL, 6, (2, 2)),  # 0.4 x 0.4
        (CAUSAL, 9, (2, 2)),  # there are no more than two
        # without shift, the first mask slot behind a node needs two rows
        (NO_SHIFT, 2, (0, 0)),  # the candidate: 0.6
        (NO_SHIFT, 3, (0, 0)),  # one row is too few for a group
        (NO_SHIFT, 4, (0, 1)),  # two rows for 0.6 x 0.7
        (NO_SHIFT, 5, (0, 2)),  # one more for 0.6 x 0.4, before two more for 0.4 x 0.7
        (NO_SHIFT, 6, (0, 2)),
        (NO_SHIFT, 7, (1, 2)),
        (NO_SHIFT, 8, (2, 2)),
        (NO_SHIFT, 9, (2, 2)),
    ],
)
def test_mask_slots_stand_where_they_promise_the_most(layout: MaskLayout, rows: int, masks: tuple[int, ...]) -> None:
    limits = DraftConfig(2, siblings=2, mask_layout=layout)
    draft = tree((predicted(candidate(t10=0.6)),), limits, WIDE, rows, outlook(0.8, 0.5))
    assert draft.masks == masks
    assert draft.rows <= rows
    assert len(draft.order) == draft.rows - 1 == len(draft.worth) - 1


@pytest.mark.parametrize(
    ("limits", "rates", "remaining", "rows", "masks"),
    [
        # a mask slot promises a token less the row that it needs then
        (DraftConfig(1), (0.19,), WIDE, WIDE, 0),
        (DraftConfig(1), (0.21,), WIDE, WIDE, 1),
        # without shift, a single one has to pay for two rows
        (DraftConfig(1, mask_layout=NO_SHIFT), (0.29,), WIDE, WIDE, 0),
        (DraftConfig(1, mask_layout=NO_SHIFT), (0.31,), WIDE, WIDE, 1),
        # each slot is worth 0.16, a row costs 0.1: one slot does not pay for two rows, two slots pay for three
        (DraftConfig(3, mask_layout=NO_SHIFT), (0.26,) * 3, WIDE, WIDE, 3),
        (DraftConfig(3, mask_layout=NO_SHIFT), (0.26,) * 3, WIDE, 4, 2),
        (DraftConfig(3, mask_layout=NO_SHIFT), (0.26,) * 3, WIDE, 3, 0),
        (DraftConfig(3, mask_layout=NO_SHIFT), (0.26,) * 3, 3, WIDE, 0),  # for one token below the limit
        (DraftConfig(5), (0.15, 0.9, 0.9, 0.9, 0.9), WIDE, WIDE, 0),  # the first one is hardly ever right
    ],
)
def test_mask_slots_behind_one_token_have_to_pay_for_their_rows(
    limits: DraftConfig, rates: tuple[float, ...], remaining: int, rows: int, masks: int
) -> None:
    assert tree((), limits, remaining, rows, outlook(*rates)).masks == (masks,)


@pytest.mark.parametrize(
    ("remaining", "expected", "masks", "looked_up"),
    [
        (1, [], (0,), 0),  # one token left: the last known one writes it
        (2, [(10,), (11,)], (0, 0, 0), 1),
        (3, BEST_FIRST, (1, 0, 0, 0, 0, 0, 0), 2),
        (4, BEST_FIRST, (2, 1, 0, 1, 0, 0, 0), 3),
    ],
)
def test_a_tree_has_nothing_beyond_the_token_limit(
    remaining: int, expected: list[tuple[int, ...]], masks: tuple[int, ...], looked_up: int
) -> None:
    """Two mask slots stand where their tokens and one more token fit below the limit."""
    draft = tree((CANDIDATES,), DraftConfig(2, siblings=2), remaining, WIDE, outlook(1.0, 1.0))
    assert paths(draft) == expected
    assert draft.masks == masks
    assert tree((Line((7, 8, 9)),), PLAN, remaining, WIDE, outlook()).tokens == (7, 8, 9)[:looked_up]


def test_a_token_that_both_propose_is_one_row_with_its_mask_slots_once() -> None:
    two = predicted(candidate(t10=0.6, t7=0.28), candidate(t8=0.5))
    draft = tree((two, Line((7, 8))), PLAN, WIDE, WIDE, outlook())
    # 10: 0.6; 7 from lookup: 0.5; 8 behind 10: 0.3; 7 from a mask slot: there; 8 behind 7 from lookup: 0.25; from both
    assert paths(draft) == [(10,), (7,), (10, 8), (7, 8)]
    assert draft.sources == ("mask", "mask+lookup", "mask", "mask+lookup")
    assert chances(draft) == pytest.approx((0.6, 0.5, 0.3, 0.25))
    draft = tree((predicted(candidate(t7=0.9)), Line((7, 8))), PLAN, WIDE, WIDE, outlook())
    assert (paths(draft), draft.sources) == ([(7,), (7, 8)], ("mask+lookup", "lookup"))
    for probability in (0.5, 0.95):
        sources = (predicted(candidate(t7=probability)), Line((7,), 0.9))
        draft = tree(sources, DraftConfig(1), WIDE, WIDE, outlook(0.4))
        assert (draft.sources, draft.masks) == (("mask+lookup",), (0, 1))


@st.composite
def guesses(draw: st.DrawFn) -> Candidates:
    """What a mask slot predicts."""
    tokens = draw(st.lists(st.integers(0, 5), max_size=4, unique=True))
    found = draw(st.lists(st.floats(0.001, 0.4), min_size=len(tokens), max_size=len(tokens)))
    return Candidates(tuple(tokens), tuple(sorted(found, reverse=True)))


FIVE = st.lists(st.floats(0, 1), min_size=5, max_size=5)
OUTLOOKS = st.builds(
    Outlook,
    st.sampled_from((0.001, 0.01, 0.08)).map(linear),
    st.floats(1, 4),
    FIVE.map(lambda gains: sorted(gains, reverse=True)),
)


@given(st.data())
def test_a_tree_is_one_whatever_it_grows_from(data: st.DataObject) -> None:
    candidates = data.draw(st.lists(guesses(), max_size=5))
    lines = [
        Line(data.draw(st.lists(st.integers(0, 5), max_size=5)), data.draw(st.floats(0, 1)), name)
        for name in data.draw(st.sampled_from(((), ("lookup",), ("lookup", "phrase"))))
    ]
    proposals: list[Proposal] = [predicted(*candidates), *lines]
    limits = DraftConfig(data.draw(st.integers(0, 5)), siblings=data.draw(st.integers(1, 3)))
    remaining, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 50))
    found = data.draw(OUTLOOKS)
    draft = tree(proposals, limits, remaining, rows, found)
    ways = paths(draft)
    assert 1 + len(ways) + sum(draft.masks) <= rows
    assert len(draft.masks) == 1 + len(ways)
    assert len(set(ways)) == len(ways)  # so no two siblings are equal
    assert all(parent <= node for node, parent in enumerate(draft.parents))
    assert max(Counter(draft.parents).values(), default=0) <= limits.siblings
    assert chances(draft) == sorted(chances(draft), reverse=True)
    for way, source in zip(ways, draft.sources, strict=True):
        depth = len(way) - 1
        assert len(way) < remaining
        names = source.split("+")
        assert "mask" not in names or way[-1] in candidates[depth].tokens[: limits.siblings]
        for line in lines:
            assert line.source not in names or list(way) == line.tokens[: len(way)]
    for way, count in zip([(), *ways], draft.masks, strict=True):
        assert count <= max(0, min(limits.mask_slots, remaining - 2 - len(way)))
    layout = lay_out(1, draft.parents, draft.masks)
    assert layout.rows == 1 + len(ways) + sum(draft.masks)
    assert all(parent < row for row, parent in enumerate(layout.parents.tolist()))
    fewer = tree(proposals, limits, remaining, max(1, rows - 1), found)
    assert draft.tokens[: len(fewer.tokens)] == fewer.tokens
    assert all(less <= more for less, more in zip(fewer.masks, draft.masks, strict=False))
