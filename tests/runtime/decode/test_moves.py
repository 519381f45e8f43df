"""Moves: what the rows of an append engine see is the same before and behind a move, and the buffer stays short."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.runtime.backends.on_tensorrt import move_slots
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.engine import NO_MOVES, Moves

CAPACITY = 96


@settings(max_examples=100)
@given(data=st.data())
def test_what_is_held_is_where_the_slots_say_and_no_slot_is_wasted(data: st.DataObject) -> None:
    """Random steps of two requests: rows are written, some are retained, older ones are released."""
    requests, first = 3, data.draw(st.integers(0, 1))
    kv = torch.zeros((4, requests, 2, CAPACITY, 3))
    slots = {request: Slots(CAPACITY, "append") for request in (first, first + 1)}
    held: dict[int, dict[int, float]] = {request: {} for request in slots}  # slot -> what was written there
    mark = 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        moves = []
        for request, own in slots.items():
            rows = data.draw(st.integers(0, 12))
            if not rows:
                moves.append(NO_MOVES)
                continue
            taken = own.take(np.arange(rows))
            for slot in taken:
                mark += 1
                kv[:, request, :, int(slot)] = mark
                held[request][int(slot)] = mark
            gone = data.draw(st.sets(st.sampled_from(sorted(held[request])), max_size=len(held[request])))
            own.release(np.array(sorted(gone), np.int64))
            for slot in gone:
                del held[request][slot]
            kept = np.array([slot for slot in taken if int(slot) in held[request]], np.int64)
            sources, targets = own.settle(kept)
            moves.append((sources, targets))
            moved = {int(s): int(t) for s, t in zip(sources, targets, strict=True)}
            assert len({moved.get(slot, slot) for slot in held[request]}) == len(held[request])
            held[request] = {moved.get(slot, slot): value for slot, value in held[request].items()}
        before = kv.clone()
        move_slots(kv, first, moves)
        for request, content in held.items():
            for slot, value in content.items():
                assert (kv[:, request, :, slot] == value).all()
            assert slots[request].height == max(content, default=-1) + 1
            (free,) = np.nonzero(slots[request]._holders[: slots[request].height] == 0)
            just = moves[request - first][1].tolist()
            assert max(just, default=-1) < free.min(initial=CAPACITY), "a gap was left below"
        assert torch.equal(kv[:, 2 - 2 * first], before[:, 2 - 2 * first]), "a request that took no part was changed"


@pytest.mark.parametrize(("sources", "targets"), [([1, 2, 3], [0, 1, 2]), ([0, 5], [5, 0]), ([7, 6], [1, 0])])
def test_slots_are_all_read_before_any_is_written_and_each_request_has_its_own_moves(
    sources: list[int], targets: list[int]
) -> None:
    kv = torch.rand((6, 4, 2, 8, 3), generator=torch.Generator().manual_seed(0))
    expected = kv.clone()
    moves: list[Moves] = [(np.array(sources), np.array(targets)), NO_MOVES, (np.array([5]), np.array([2]))]
    for request, (before, behind) in enumerate(moves, 1):
        for source, target in zip(before, behind, strict=True):
            expected[:, request, :, int(target)] = kv[:, request, :, int(source)]
    move_slots(kv, 1, moves)
    assert torch.equal(kv, expected)
