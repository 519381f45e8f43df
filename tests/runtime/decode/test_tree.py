"""Trees: which rows a draft has, and in which order they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig
from spaceport.runtime.decode.plan import lay_out
from spaceport.runtime.decode.tree import Curve, Outlook, tree

WIDE = 99  # more tokens, or rows, than anything needs
PLAN = DraftConfig(siblings=2)


def linear(row: float) -> Curve:
    """Each further row costs the same."""
    return Curve([1 + row * more for more in range(WIDE)])


def outlook(*masks: float, row: float = 0.1, lookup: float = 0.5, trust: tuple[float, ...] = ()) -> Outlook:
    """A row has to be worth `row` tokens; mask slots are right as often as `masks` says and cost a row later."""
    gains = tuple(max(0.0, rate - row) for rate in (*masks, *(0.0,) * 6))
    return Outlook(linear(row), 1.0, gains, trust, (lookup,) * 9)


def candidate(**probability_of: float) -> Candidates:
    """Candidates with tokens named t10 and so on."""
    return Candidates(tuple(int(name[1:]) for name in probability_of), tuple(probability_of.values()))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The way of tokens to each candidate."""
    ways: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        ways.append((*ways[parent], token))
    return ways[1:]


CANDIDATES = (candidate(t10=0.6, t11=0.28), candidate(t20=0.5, t21=0.4))
BEST_FIRST = [
    (10,),  # 0.6
    (10, 20),  # 0.6 x 0.5 = 0.3
    (11,),  # 0.28
    (10, 21),  # 0.24
    (11, 20),  # 0.14
    (11, 21),  # 0.112
]


@pytest.mark.parametrize("rows", range(1, 9))
def test_candidates_come_best_first_while_there_are_rows(rows: int) -> None:
    draft = tree(CANDIDATES, (), PLAN, WIDE, rows, outlook())
    assert paths(draft) == BEST_FIRST[: rows - 1]
    assert draft.probabilities == pytest.approx((0.6, 0.3, 0.28, 0.24, 0.14, 0.112)[: rows - 1])
    assert draft.sources == ("mask",) * len(draft.tokens)
    assert draft.masks == (0,) * (1 + len(draft.tokens))


def test_of_equals_the_first_to_come_up_is_the_first() -> None:
    candidates = (candidate(t10=0.5, t11=0.25), candidate(t20=0.5))
    assert paths(tree(candidates, (), PLAN, WIDE, 3, outlook())) == [(10,), (11,)]


@pytest.mark.parametrize(("row", "count"), [(0.1, 6), (0.12, 5), (0.2, 4), (0.26, 3), (0.29, 2), (0.5, 1), (0.7, 0)])
def test_a_row_that_promises_too_little_is_not_fed(row: float, count: int) -> None:
    draft = tree(CANDIDATES, (), PLAN, WIDE, WIDE, outlook(row=row))
    assert paths(draft) == BEST_FIRST[:count]


@pytest.mark.parametrize(("siblings", "expected"), [(1, [(10,), (10, 20)]), (2, BEST_FIRST), (3, BEST_FIRST)])
def test_no_position_has_more_candidates_than_siblings_are_allowed(
    siblings: int, expected: list[tuple[int, ...]]
) -> None:
    draft = tree(CANDIDATES, (), DraftConfig(siblings=siblings), WIDE, WIDE, outlook())
    assert paths(draft) == expected


def test_mask_slots_that_are_too_sure_of_themselves_are_trusted_less() -> None:
    """Their probability is 0.8, their acceptance 0.4: all probabilities are halved, and again at the second position."""
    draft = tree(CANDIDATES, (), PLAN, WIDE, WIDE, outlook(trust=(0.5,)))
    assert paths(draft) == [(10,), (11,)]
    assert draft.probabilities == pytest.approx((0.3, 0.14))


@pytest.mark.parametrize(
    ("rows", "tokens", "masks"),
    [
        (1, 0, (0,)),
        (2, 1, (0, 0)),  # the candidate: 0.6
        (3, 1, (0, 1)),  # a mask slot behind it, right eight times in ten and worth a row of the next step: 0.6 x 0.7
        (4, 1, (1, 1)),  # behind the last known token, if the candidate is rejected: 0.4 x 0.7
        (5, 1, (1, 2)),  # 0.6 x 0.4
        (6, 1, (2, 2)),  # 0.4 x 0.4
        (9, 1, (2, 2)),  # there are no more than two
    ],
)
def test_mask_slots_stand_where_they_promise_the_most(rows: int, tokens: int, masks: tuple[int, ...]) -> None:
    draft = tree((candidate(t10=0.6),), (), DraftConfig(2, siblings=2), WIDE, rows, outlook(0.8, 0.5))
    assert (len(draft.tokens), draft.masks) == (tokens, masks)


@pytest.mark.parametrize(
    ("rows", "tokens", "masks"),
    [
        (2, 1, (0, 0)),  # the candidate: 0.6
        (3, 1, (0, 0)),  # one row is too few for a group
        (4, 1, (0, 1)),  # two rows for 0.6 x 0.7
        (5, 1, (0, 2)),  # one more for 0.6 x 0.4, before two more for 0.4 x 0.7
        (6, 1, (0, 2)),
        (7, 1, (1, 2)),
        (8, 1, (2, 2)),
        (9, 1, (2, 2)),
    ],
)
def test_without_shift_the_first_mask_slot_behind_a_node_needs_two_rows(
    rows: int, tokens: int, masks: tuple[int, ...]
) -> None:
    limits = DraftConfig(2, siblings=2, mask_layout=MaskLayout(shift=False))
    draft = tree((candidate(t10=0.6),), (), limits, WIDE, rows, outlook(0.8, 0.5))
    assert (len(draft.tokens), draft.masks) == (tokens, masks)
    assert draft.rows <= rows
    assert len(draft.order) == draft.rows - 1 == len(draft.worth) - 1


@pytest.mark.parametrize(("rate", "masks"), [(0.29, 0), (0.31, 1)])
def test_without_shift_a_single_mask_slot_has_to_pay_for_two_rows(rate: float, masks: int) -> None:
    limits = DraftConfig(1, mask_layout=MaskLayout(shift=False))
    assert tree((), (), limits, WIDE, WIDE, outlook(rate)).masks == (masks,)


def test_without_shift_a_group_opens_if_all_of_its_slots_together_pay() -> None:
    """Each slot is worth 0.16, a row costs 0.1: one slot does not pay for two rows, two slots pay for three."""
    limits = DraftConfig(3, mask_layout=MaskLayout(shift=False))
    rates = (0.26,) * 3
    assert tree((), (), limits, WIDE, WIDE, outlook(*rates)).masks == (3,)
    assert tree((), (), limits, WIDE, 4, outlook(*rates)).masks == (2,)
    assert tree((), (), limits, WIDE, 3, outlook(*rates)).masks == (0,)
    assert tree((), (), limits, 3, WIDE, outlook(*rates)).masks == (0,)  # for one token below the limit


def test_mask_slots_stand_nowhere_if_they_are_never_right() -> None:
    draft = tree(CANDIDATES, (), DraftConfig(5, siblings=2), WIDE, WIDE, outlook(0.15, 0.9, 0.9, 0.9, 0.9))
    assert sum(draft.masks) == 0


@pytest.mark.parametrize(("rate", "masks"), [(0.19, 0), (0.21, 1)])
def test_a_mask_slot_promises_a_token_less_the_row_that_it_needs_then(rate: float, masks: int) -> None:
    assert tree((), (), DraftConfig(1, siblings=2), WIDE, WIDE, outlook(rate)).masks == (masks,)


@pytest.mark.parametrize(
    ("remaining", "expected", "masks"),
    [
        (1, [], (0,)),  # one token left: the last known one writes it
        (2, [(10,), (11,)], (0, 0, 0)),
        (3, BEST_FIRST, (1, 0, 0, 0, 0, 0, 0)),
        (4, BEST_FIRST, (2, 1, 0, 1, 0, 0, 0)),
    ],
)
def test_a_tree_has_nothing_beyond_the_token_limit(
    remaining: int, expected: list[tuple[int, ...]], masks: tuple[int, ...]
) -> None:
    """Two mask slots stand where their tokens and one more token fit below the limit."""
    draft = tree(CANDIDATES, (), DraftConfig(2, siblings=2), remaining, WIDE, outlook(1.0, 1.0))
    assert paths(draft) == expected
    assert draft.masks == masks


@pytest.mark.parametrize(("row", "count"), [(0.1, 3), (0.2, 2), (0.3, 1), (0.6, 0)])
def test_looked_up_tokens_are_a_line_that_gets_less_likely(row: float, count: int) -> None:
    draft = tree((), (7, 8, 9), PLAN, WIDE, WIDE, outlook(row=row))
    assert draft.tokens == (7, 8, 9)[:count]
    assert draft.parents == (0, 1, 2)[:count]
    assert draft.sources == ("lookup",) * count
    assert draft.probabilities == (0.5, 0.25, 0.125)[:count]


@pytest.mark.parametrize(("remaining", "count"), [(1, 0), (2, 1), (3, 2), (9, 3)])
def test_nothing_is_looked_up_beyond_the_token_limit(remaining: int, count: int) -> None:
    assert tree((), (7, 8, 9), PLAN, remaining, WIDE, outlook()).tokens == (7, 8, 9)[:count]


@pytest.mark.parametrize(
    ("rate", "masks"),
    [
        (0.5, (1, 1, 1)),  # 0.5 x 0.7 behind the last known token, 0.25 x 0.7 behind either token from lookup
        (0.8, (1, 1, 1)),  # 0.2 x 0.7; 0.8 x 0.2 x 0.7; 0.64 x 0.7, since lookup has nothing more
        (0.9, (0, 0, 1)),  # 0.1 x 0.7; 0.9 x 0.1 x 0.7; 0.81 x 0.7
    ],
)
def test_mask_slots_stand_where_a_look_up_may_end(rate: float, masks: tuple[int, ...]) -> None:
    draft = tree((), (7, 8), DraftConfig(1, siblings=2), WIDE, WIDE, outlook(0.8, lookup=rate))
    assert (draft.tokens, draft.masks) == ((7, 8), masks)


@pytest.mark.parametrize("probability", [0.5, 0.95])
def test_a_token_that_both_propose_gets_its_mask_slots_once(probability: float) -> None:
    draft_config = DraftConfig(1, siblings=2)
    draft = tree((candidate(t7=probability),), (7,), draft_config, WIDE, WIDE, outlook(0.4, lookup=0.9))
    assert (draft.sources, draft.masks) == (("both",), (0, 1))


def test_a_token_that_both_propose_is_one_row() -> None:
    candidates = (candidate(t10=0.6, t7=0.28), candidate(t8=0.5))
    draft = tree(candidates, (7, 8), PLAN, WIDE, WIDE, outlook())
    # 10: 0.6; 7 from lookup: 0.5; 8 behind 10: 0.3; 7 from a mask slot: there; 8 behind 7 from lookup: 0.25; the same from mask slots: there
    assert paths(draft) == [(10,), (7,), (10, 8), (7, 8)]
    assert draft.sources == ("mask", "both", "mask", "both")
    assert draft.probabilities == pytest.approx((0.6, 0.5, 0.3, 0.25))


def test_a_guessed_token_that_is_looked_up_too_leads_on_to_what_was_looked_up() -> None:
    draft = tree((candidate(t7=0.9),), (7, 8), PLAN, WIDE, WIDE, outlook())
    assert paths(draft) == [(7,), (7, 8)]
    assert draft.sources == ("both", "lookup")


JUMP = Curve([1.0, 2.0, 2.1, 2.2, 2.3, 2.4])  # the second row costs as much as the first, further ones next to nothing


@pytest.mark.parametrize(("lookup", "count"), [(0.5, 0), (0.55, 0), (0.75, 5)])
def test_rows_behind_a_jump_are_fed_together_or_not_at_all(lookup: float, count: int) -> None:
    plan = Outlook(JUMP, 1.0, (), (), (lookup,) * 9)
    draft = tree((), range(100, 109), DraftConfig(lookup=9), WIDE, WIDE, plan)
    assert (len(draft.tokens), draft.masks) == (count, (0,) * (1 + count))


@pytest.mark.parametrize(("later", "masks"), [(0.11, 0), (0.15, 0), (0.3, 5)])
def test_mask_slots_behind_a_jump_are_fed_together_or_not_at_all(later: float, masks: int) -> None:
    draft = tree((), (), DraftConfig(mask_slots=5), WIDE, WIDE, Outlook(JUMP, 1.0, (0.4, 0.4, later, later, later)))
    assert draft.masks == (masks,)


def test_without_candidates_and_mask_slots_nothing_is_drafted() -> None:
    assert tree((), (), DraftConfig(), WIDE, WIDE, outlook()).rows == 1


@st.composite
def with_mask(draw: st.DrawFn) -> Candidates:
    tokens = draw(st.lists(st.integers(0, 5), max_size=4, unique=True))
    probability_of = sorted(
        draw(st.lists(st.floats(0.001, 0.4), min_size=len(tokens), max_size=len(tokens))), reverse=True
    )
    return Candidates(tuple(tokens), tuple(probability_of))


DRAFT_CONFIGS = st.builds(
    DraftConfig,
    mask_slots=st.integers(0, 5),
    siblings=st.integers(1, 3),
)
OUTLOOKS = st.builds(
    Outlook,
    st.sampled_from((0.001, 0.01, 0.08)).map(linear),
    st.floats(1, 4),
    st.lists(st.floats(0, 1), min_size=5, max_size=5).map(lambda gains: sorted(gains, reverse=True)),
    st.lists(st.floats(0.1, 1), max_size=3),
    st.lists(st.floats(0, 1), min_size=5, max_size=5),
)


@given(
    candidates=st.lists(with_mask(), max_size=5),
    lookup_tokens=st.lists(st.integers(0, 5), max_size=5),
    draft_config=DRAFT_CONFIGS,
    remaining=st.integers(1, 9),
    rows=st.integers(1, 50),
    found=OUTLOOKS,
)
def test_a_tree_is_one_whatever_it_grows_from(
    candidates: list[Candidates],
    lookup_tokens: list[int],
    draft_config: DraftConfig,
    remaining: int,
    rows: int,
    found: Outlook,
) -> None:
    draft = tree(candidates, lookup_tokens, draft_config, remaining, rows, found)
    ways = paths(draft)
    assert 1 + len(ways) + sum(draft.masks) <= rows
    assert len(draft.masks) == 1 + len(ways)
    assert len(set(ways)) == len(ways)  # so no two siblings are equal
    assert all(parent <= node for node, parent in enumerate(draft.parents))
    assert list(draft.probabilities) == sorted(draft.probabilities, reverse=True)
    for way, source in zip(ways, draft.sources, strict=True):
        depth = len(way) - 1
        assert len(way) < remaining
        by_mask = depth < len(candidates) and way[-1] in candidates[depth].tokens[: draft_config.siblings]
        by_lookup = list(way) == lookup_tokens[: len(way)]
        assert by_mask or source == "lookup"
        assert by_lookup or source == "mask"
    for way, masks in zip([(), *ways], draft.masks, strict=True):
        assert masks <= max(0, min(draft_config.mask_slots, remaining - 2 - len(way)))
    layout = lay_out(1, draft.parents, draft.masks)
    assert layout.rows == 1 + len(ways) + sum(draft.masks)
    assert all(parent < row for row, parent in enumerate(layout.parents.tolist()))
    fewer = tree(candidates, lookup_tokens, draft_config, remaining, max(1, rows - 1), found)
    assert draft.tokens[: len(fewer.tokens)] == fewer.tokens
    assert all(less <= more for less, more in zip(fewer.masks, draft.masks, strict=False))
