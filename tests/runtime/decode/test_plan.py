"""Plans and verdicts, row by row: where a wrong mask slot would cost speed and no text would show it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import PLAIN, Candidates, Draft, chain
from spaceport.runtime.decode.plan import Part, Verdict, accept, joined, lay_out, mark_visible, plan_thread, within
from spaceport.runtime.decode.sequence import NotANumber, TokenSequence
from support.hash_engine import greedy

M = 90
IDS = TokenIds(mask=(M,), end=(99,))


def thread_with(tokens: list[int], fed: int, held: list[int], slots: int = 32) -> TokenSequence:
    mask = np.zeros(slots, np.bool_)
    mask[held] = True
    return TokenSequence((), tokens, 1, mask, fed=fed)


# The rows of each step: name, what it sees, position.
SPACE = """
    x     1  0   0   0  0   0   0  0   0    p
    m01   1  1   0   0  0   0   0  0   0    p+1
    m02   1  1   1   0  0   0   0  0   0    p+2
    c1    1  0   0   1  0   0   0  0   0    p+1
    m11   1  0   0   1  1   0   0  0   0    p+2
    m12   1  0   0   1  1   1   0  0   0    p+3
    c2    1  0   0   1  0   0   1  0   0    p+2
    m21   1  0   0   1  0   0   1  1   0    p+3
    m22   1  0   0   1  0   0   1  1   1    p+4
"""
BLOCK = """
    x     1  0   0   0  0   0    p
    m01   1  1   1   0  0   0    p+1
    m02   1  1   1   0  0   0    p+2
    c1    1  0   0   1  0   0    p+1
    m11   1  0   0   1  1   1    p+2
    m12   1  0   0   1  1   1    p+3
"""
UNSHIFTED = """
    x     1  0   0   0  0   0   0  0    p
    m01   1  1   0   0  0   0   0  0    p+1
    m02   1  1   1   0  0   0   0  0    p+2
    m03   1  1   1   1  0   0   0  0    p+3
    c1    1  0   0   0  1   0   0  0    p+1
    m11   1  0   0   0  1   1   0  0    p+2
    m12   1  0   0   0  1   1   1  0    p+3
    m13   1  0   0   0  1   1   1  1    p+4
"""
UNSHIFTED_BLOCK = """
    x     1  0   0   0  0   0   0  0    p
    m01   1  1   1   1  0   0   0  0    p+1
    m02   1  1   1   1  0   0   0  0    p+2
    m03   1  1   1   1  0   0   0  0    p+3
    c1    1  0   0   0  1   0   0  0    p+1
    m11   1  0   0   0  1   1   1   1   p+2
    m12   1  0   0   0  1   1   1   1   p+3
    m13   1  0   0   0  1   1   1   1   p+4
"""


@pytest.mark.parametrize(
    ("candidates", "layout", "table", "groups"),
    [
        ([31, 32], CAUSAL, SPACE, ((1, 2), (4, 5), (7, 8))),
        ([31], MaskLayout(group="block"), BLOCK, ((1, 2), (4, 5))),
        ([31], MaskLayout(shift=False), UNSHIFTED, ((2, 3), (6, 7))),
        ([31], MaskLayout(shift=False, group="block"), UNSHIFTED_BLOCK, ((2, 3), (6, 7))),
    ],
)
def test_a_step_is_the_worked_table_of_its_mask_layout(
    candidates: list[int], layout: MaskLayout, table: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    """x at position 3, k = 2; older slots of the line are 4, 7 and 1. Without shift, the first mask row predicts nothing."""
    thread = thread_with([10, 11, 12, 20], fed=3, held=[4, 7, 1])
    draft = chain(candidates, 2, remaining=100, mask_layout=layout)
    part = plan_thread(thread, draft, IDS, chunk=512)
    rows = [line.split() for line in table.strip().split("\n")]
    names = {"x": 20, "c1": 31, "c2": 32}
    assert part.tokens.tolist() == [names.get(row[0], M) for row in rows]
    assert part.positions.tolist() == [3 + int(row[-1].partition("+")[2] or 0) for row in rows]
    slots = np.array([0, 2, 3, 5, 6, 8, 9, 10, 11])[: len(rows)]
    mask = np.empty((len(rows), 16), np.bool_)
    mark_visible((part,), slots, mask)
    assert mask[:, slots].astype(int).tolist() == [[int(cell) for cell in row[1:-1]] for row in rows]
    others = np.setdiff1d(np.arange(16), slots)
    assert all(others[line].tolist() == [1, 4, 7] for line in mask[:, others])
    found = part.layout
    assert found.nodes == tuple(index for index, row in enumerate(rows) if row[0] in names)
    assert found.groups == groups
    depths = [int(row[0][2]) - 1 if row[0].startswith("m") else -1 for row in rows]
    assert found.mask_depths.tolist() == depths
    assert np.flatnonzero(found.slot_ranks == 2).tolist() == found.mask_rows.tolist()
    assert found.wanted.tolist() == list(range(len(rows)))
    assert draft.rows == found.rows == len(rows)


@pytest.mark.parametrize("masks", [(91, 92, 93), (91, 92, 93, 94)])
def test_distinct_mask_tokens_are_numbered_by_the_rows_of_a_group(masks: tuple[int, ...]) -> None:
    thread = thread_with([10, 20], fed=1, held=[0])
    draft = chain([], 2, remaining=100, mask_layout=MaskLayout(shift=False))
    part = plan_thread(thread, draft, TokenIds(mask=masks), chunk=512)
    assert part.tokens.tolist() == [20, 91, 92, 93]


def test_siblings_see_their_ancestors_and_not_each_other() -> None:
    layout = lay_out(1, (0, 0, 1), (1, 0, 0, 2))
    assert layout.parents.tolist() == [-1, 0, 0, 0, 2, 4, 5]
    assert layout.offsets.tolist() == [0, 1, 1, 1, 2, 3, 4]
    assert layout.nodes == (0, 2, 3, 4)
    assert layout.drafted == (2, 1)
    seen = [np.flatnonzero(row).tolist() for row in layout.visible]
    assert seen == [[0], [0, 1], [0, 2], [0, 3], [0, 2, 4], [0, 2, 4, 5], [0, 2, 4, 5, 6]]


@pytest.mark.parametrize(
    ("known", "parents", "masks", "order"),
    [
        (1, (), (0,), [0]),
        (3, (), (2,), [0, 1, 2, 3, 4]),
        (1, (0, 1), (2, 2, 2), [0, 3, 6, 1, 2, 4, 5, 7, 8]),  # x m m c m m c m m
        (2, (0, 1), (1, 1, 1), [0, 1, 3, 5, 2, 4, 6]),
        (1, (0, 0, 1), (1, 0, 0, 2), [0, 2, 4, 3, 1, 5, 6]),  # x m c c' d m m: d follows c
        (1, (0, 0, 2), (1, 0, 0, 2), [0, 2, 3, 4, 1, 5, 6]),  # d follows c', which is not on the first path
    ],
)
def test_the_first_path_gets_the_lowest_slots_and_mask_slots_the_highest(
    known: int, parents: tuple[int, ...], masks: tuple[int, ...], order: list[int]
) -> None:
    layout = lay_out(known, parents, masks)
    assert layout.slot_order.tolist() == order
    part = part_for(Draft(tuple(range(len(parents))), parents, masks), known)  # those of all threads come first
    ranks = [layout.slot_ranks[row % layout.rows] for row in joined((part, part))[-1]]
    assert ranks == sorted(ranks)


def test_a_prompt_is_fed_in_chunks_and_drafts_behind_its_last_token_only() -> None:
    thread = thread_with([10, 11, 12, 13, 14], fed=0, held=[])
    first = plan_thread(thread, chain([], 2, remaining=100), IDS, chunk=3)
    assert (first.tokens.tolist(), first.complete, first.rows_wanted.size) == ([10, 11, 12], False, 0)
    assert accept(first, np.zeros((0, 100), np.float32), greedy()) == Verdict((0, 1, 2), (), ())
    thread.fed = 3
    last = plan_thread(thread, chain([], 2, remaining=100), IDS, chunk=3)
    assert (last.tokens.tolist(), last.positions.tolist()) == ([13, 14, M, M], [3, 4, 5, 6])
    assert (last.layout.wanted.tolist(), last.rows_wanted.size) == ([1, 2, 3], 3)


def test_an_echo_needs_the_rows_of_a_prompt_from_a_position_on() -> None:
    thread = thread_with([10, 11, 12, 13, 14], fed=0, held=[])
    wanted = [plan_thread(thread, PLAIN, IDS, 3, echo=position).rows_wanted.tolist() for position in range(5)]
    assert wanted == [[0, 1, 2], [1, 2], [2], [], []]
    thread.fed = 3
    parts = [plan_thread(thread, chain([], 2, remaining=9), IDS, 3, echo=position) for position in range(6)]
    # the last known token's row is always wanted
    assert [part.rows_wanted.tolist() for part in parts] == [[0, 1, 2, 3]] * 4 + [[1, 2, 3]] * 2
    assert [int(part.rows_wanted[0]) for part in parts] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_counts_positions_and_not_slots(window: int) -> None:
    slot_positions = np.array([3, 0, 9, 1, 2])  # slot 2 is free: its position is left over
    mask = np.array([[True, True, False, True, True]])
    near = within(window, mask, np.array([3]), slot_positions)
    seen = sorted(slot_positions[near[0]].tolist())
    assert seen == [position for position in range(4) if 3 - position < window]


def part_for(draft: Draft, known: int = 1) -> Part:
    tokens = list(range(10, 10 + known))
    return plan_thread(thread_with(tokens, fed=0, held=[]), draft, IDS, chunk=512)


def lines(*tokens: int) -> NDArray[np.float32]:
    logits = np.zeros((len(tokens), 100), np.float32)
    logits[np.arange(len(tokens)), tokens] = 1
    return logits


def with_mask(*tokens: int) -> tuple[Candidates, ...]:
    return tuple(Candidates((token,), (1.0,)) for token in tokens)


K2 = Draft((31, 32), (0, 1), (2, 2, 2))  # rows: x m01 m02 c1 m11 m12 c2 m21 m22
# 31 and 41 side by side, 32 behind 41; masks behind x and 32: x m01 c31 c41 c32 m m
TREE = Draft((31, 41, 32), (0, 0, 2), (1, 0, 0, 2))


@pytest.mark.parametrize(
    ("part", "logits", "verdict"),
    [
        (part_for(K2), lines(5, 6, 7, 0, 0, 0, 0, 0, 0), Verdict((0,), (5,), with_mask(6, 7))),
        (part_for(K2), lines(31, 6, 7, 5, 8, 9, 0, 0, 0), Verdict((0, 3), (31, 5), with_mask(8, 9))),
        (part_for(K2), lines(31, 6, 7, 32, 8, 9, 5, 3, 4), Verdict((0, 3, 6), (31, 32, 5), with_mask(3, 4))),
        # the right token, one position too early
        (part_for(K2), lines(32, 6, 7, 32, 8, 9, 5, 3, 4), Verdict((0,), (32,), with_mask(6, 7))),
        # the parent of 32 is 41, not 31
        (part_for(TREE), lines(31, 6, 32, 0, 0, 0, 0), Verdict((0, 2), (31, 32), ())),
        (part_for(TREE), lines(41, 6, 0, 32, 5, 3, 4), Verdict((0, 3, 4), (41, 32, 5), with_mask(3, 4))),
        (part_for(TREE), lines(41, 6, 0, 9, 5, 3, 4), Verdict((0, 3), (41, 9), ())),  # no masks behind 41
        (part_for(PLAIN), lines(5), Verdict((0,), (5,), ())),
        # a prompt's last chunk keeps its known rows and what is accepted: 10 11 12 m c1 m
        (part_for(Draft((31,), (0,), (1, 1)), 3), lines(31, 6, 5, 7), Verdict((0, 1, 2, 4), (31, 5), with_mask(7))),
    ],
)
def test_the_verdict_is_the_walk_along_the_networks_own_tokens(
    part: Part, logits: NDArray[np.float32], verdict: Verdict
) -> None:
    assert accept(part, logits, greedy()) == verdict


BEFORE = thread_with([10, 11], fed=0, held=[])


def test_greedy_takes_the_lowest_id_of_equals_and_passes_over_what_is_banned() -> None:
    assert greedy().token(np.array([0, 2, 2, 1], np.float32), BEFORE, ()) == 1
    logits = np.array([0, 5, 4, 3, 3], np.float32)
    assert greedy((1, 2)).token(logits, BEFORE, ()) == 3
    assert greedy((1, 2)).candidates(logits[None], BEFORE, 2, 1) == with_mask(3)
    assert logits.tolist() == [0, 5, 4, 3, 3]  # what the engine owns stays as it is


def test_logits_that_are_not_numbers_are_an_error_unless_the_text_may_end_before_them() -> None:
    with pytest.raises(NotANumber, match="position 5 hold NaN"):
        greedy().token(np.array([0, np.nan, 2], np.float32), BEFORE, (7, 8, 9))
    with pytest.raises(NotANumber, match=r"position 2 hold NaN, .Inf or only -Inf for allowed tokens"):
        greedy((1, 2)).token(np.array([-np.inf, 5, 4, -np.inf], np.float32), BEFORE, ())
    logits = lines(31, 6, 7, 0, 8, 9, 0, 0, 0)
    logits[3:] = np.nan
    assert accept(part_for(K2), logits, greedy()) == Verdict((0,), (31,), with_mask(6, 7))
