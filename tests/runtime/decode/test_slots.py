"""Slots: holders are counted, the lowest free ones are given, an append engine's gaps are closed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.decode.sequence import Slots, SlotsExhausted


def take(slots: Slots, count: int) -> list[int]:
    taken: list[int] = slots.allocate(np.arange(count)).tolist()
    return taken


def test_an_order_says_who_gets_the_lowest_slot_of_a_scatter_engine() -> None:
    order = np.array([2, 0, 1])
    slots = Slots(8, "scatter")
    slots.free(slots.allocate(np.zeros(4, np.int64))[1:2])  # 0, 2 and 3 stay
    assert slots.allocate(np.array([7, 8, 9]), order).tolist() == [4, 5, 1]
    assert (slots.positions[[1, 4, 5]].tolist(), slots.held, slots.height) == ([9, 7, 8], 6, 6)
    assert Slots(8, "append").allocate(np.array([7, 8, 9]), order).tolist() == [0, 1, 2]


def test_append_gives_a_run_behind_the_highest_held_slot() -> None:
    slots = Slots(16, "append")
    assert take(slots, 4) == [0, 1, 2, 3]
    slots.free(np.array([1]))
    assert take(slots, 3) == [4, 5, 6]
    with pytest.raises(SlotsExhausted, match="step needs 9 slots, 8 are free"):
        take(slots, 9)


def test_cleared_slots_are_free_whoever_held_them() -> None:
    slots = Slots(8, "append")
    slots.share(slots.allocate(np.arange(5)))
    slots.clear()
    assert (slots.held, slots.height) == (0, 0)
    assert take(slots, 2) == [0, 1]


@given(st.lists(st.tuples(st.sampled_from(("take", "share", "release")), st.integers(1, 2**12 - 1)), max_size=30))
def test_a_slot_is_free_when_as_many_let_go_of_it_as_took_it(acts: list[tuple[str, int]]) -> None:
    slots = Slots(12, "scatter")
    holders = [0] * 12
    for act, bits in acts:
        held = [slot for slot in range(12) if holders[slot] and bits >> slot & 1]
        free = [slot for slot in range(11) if not holders[slot]]
        if act == "take":
            held = free[: 1 + bits % len(free)] if free else []
            assert not held or take(slots, len(held)) == held
            with pytest.raises(SlotsExhausted, match=f"step needs 12 slots, {len(free) - len(held)} are free"):
                take(slots, 12)
        elif act == "share":
            slots.share(np.array(held, np.int64))
        else:
            slots.free(np.array(held, np.int64))
        for slot in held:
            holders[slot] += -1 if act == "release" else 1
        assert slots.still_held(np.arange(12)).tolist() == [slot for slot in range(12) if holders[slot]]
        assert slots.held == sum(map(bool, holders))
        assert slots.height == max((slot + 1 for slot in range(12) if holders[slot]), default=0)


def test_what_nobody_holds_cannot_be_shared_or_released() -> None:
    slots = Slots(8, "scatter")
    with pytest.raises(ValueError, match="only held slots can be freed"):
        slots.free(np.array([0]))
    with pytest.raises(ValueError, match="only held slots can be shared"):
        slots.share(np.array([0]))


def test_kept_rows_move_down_into_the_gaps_with_their_positions_and_holders() -> None:
    slots = Slots(16, "append")
    slots.allocate(np.array([0, 1]))
    run = slots.allocate(np.array([2, 3, 4, 3, 4, 5]))  # x m m c m m
    kept = run[[0, 3]]
    slots.share(kept[1:])
    slots.free(np.setdiff1d(run, kept))
    assert [moved.tolist() for moved in slots.compact(kept)] == [[5], [3]]
    assert (slots.height, slots.positions[:4].tolist()) == (4, [0, 1, 2, 3])
    slots.free(np.array([3]))
    assert slots.still_held(np.arange(16)).tolist() == [0, 1, 2, 3]
    slots.free(np.array([3]))
    assert slots.height == 3


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**9 - 1), st.integers(0, 2**40)), max_size=12))
def test_what_an_append_engine_holds_is_moved_together(steps: list[tuple[int, int, int]]) -> None:
    """Rows are written, some are retained, older ones are released: the next retained ones fill their gaps."""
    slots, fresh = Slots(256, "append"), iter(range(10**6))
    content: dict[int, int] = {}  # by slot
    for count, kept_bits, released_bits in steps:
        old = list(content)
        run = slots.allocate(np.arange(count)).tolist()
        gone = {slot for index, slot in enumerate(old) if released_bits >> index & 1}
        gone |= {slot for index, slot in enumerate(run) if not kept_bits >> index & 1}
        content |= {slot: next(fresh) for slot in run}
        slots.free(np.array(sorted(gone), np.int64))
        content = {slot: what for slot, what in content.items() if slot not in gone}
        sources, targets = slots.compact(np.array([slot for slot in run if slot in content], np.int64))
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        expected = sorted(content.values())
        content = {moved.get(slot, slot): what for slot, what in content.items()}
        assert sorted(content.values()) == expected, "two rows are in one slot"
        assert sorted(content) == slots.still_held(np.arange(256)).tolist()
        assert (slots.held, slots.height) == (len(content), max(content, default=-1) + 1)
        new = [moved.get(slot, slot) for slot in run if slot not in gone]
        assert max(new, default=-1) < min({*range(256)} - {*content}), "a gap was left below"
