"""Cases: the calls of a check go where those of a runtime go, and are replayed as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.runtime.decode.step import PREFILL_ROWS
from spaceport.runtime.engine import Moves
from spaceport.tools.verify.check.cases import REQUESTS, Recording, Room, record, replay
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.small_bundle import fill

LENGTH = 647  # the longest prompt ends a row before a call of 128 is full
CAPACITY = visible_length(LENGTH + 64 + STEP_ROWS + PREFILL_ROWS + 1)


@dataclass
class MovedEngine(HashEngine):
    """A fake engine that notes which requests' slots it was told to move at a time."""

    moved: list[list[int]] = field(default_factory=list)

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        super().move(first, moves)
        if busy := [request for request, (sources, _) in enumerate(moves, first) if sources.size]:
            self.moved.append(busy)


def recorded_on(engine: HashEngine, tmp_path: Path, rows: int = PREFILL_ROWS) -> Recording:
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(MASKS))
    return record(engine, manifest, Room(LENGTH, CAPACITY, REQUESTS, rows))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_calls_are_as_wide_and_begin_as_late_as_those_of_a_runtime(lowering: Lowering, tmp_path: Path) -> None:
    """A request goes on alone behind one that has gone; drafts of several are accepted at once."""
    engine = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, lowering)
    feeds, left_out = recorded_on(engine, tmp_path)
    assert not left_out
    assert max(engine.widths) == PREFILL_ROWS
    assert {int(feed.arrays["first"][0]) for feed in feeds} == {0, REQUESTS - 1}
    assert ([0, 1] in engine.moved) == (lowering == "append")


def test_given_drafts_are_fed_row_by_row(tmp_path: Path) -> None:
    """Behind the last known token: a chain of 23 candidates, and trees of 12 with their mask slots."""
    engine = HashEngine(Language(1, 70), CAPACITY, REQUESTS)
    feeds, _ = recorded_on(engine, tmp_path)
    last = {feed.case: feed.arrays["logit_rows"].shape[1] for feed in feeds}
    assert last["prompt, every row"] == 1 + 23
    assert all(last[f"random tree {number}"] > 1 + 12 for number in (1, 2, 3))


def test_moves_are_replayed_as_they_were_made(tmp_path: Path) -> None:
    engine = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    feeds, _ = recorded_on(engine, tmp_path)
    other = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    call = replay(other)
    for feed in feeds:
        assert np.array_equal(call(feed.arrays), feed.expected, equal_nan=True)
    assert [0, 1] in other.moved


@pytest.mark.parametrize(("window", "told"), [(16, []), (638, []), (639, ["639 positions: raise --long"]), (1024, [])])
def test_a_window_that_no_case_reaches_beyond_is_told_of(window: int, told: list[str], tmp_path: Path) -> None:
    """A graph that forgets it would pass; where the model knows no more positions, nothing is beyond."""
    engine = HashEngine(Language(1, 70, window=window), CAPACITY, REQUESTS, "append")
    _, left_out = recorded_on(engine, tmp_path)
    assert len(left_out) == len(told)
    assert all(expected in line for line, expected in zip(left_out, told, strict=True))


def test_no_call_is_wider_than_the_narrowest_engine_takes(tmp_path: Path) -> None:
    engine = HashEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    recorded_on(engine, tmp_path, STEP_ROWS)
    assert max(engine.widths) == STEP_ROWS
