"""Cases: the recorded calls cover what a runtime does, and are replayed as they were recorded."""

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
from spaceport.tools.verify.check.cases import REQUESTS, EngineLimits, Recording, record, replay
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.small_bundle import fill

LENGTH = 647  # the longest prompt ends a row before a call of 128 is full
CAPACITY = visible_length(LENGTH + 64 + STEP_ROWS + PREFILL_ROWS + 1)


@dataclass
class MovedEngine(HashEngine):
    """A fake engine that records which requests' KV slots move in each call."""

    moved: list[list[int]] = field(default_factory=list)

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        super().move(first, moves)
        if busy := [request for request, (sources, _) in enumerate(moves, first) if sources.size]:
            self.moved.append(busy)


def recorded_on(engine: HashEngine, tmp_path: Path, rows: int = PREFILL_ROWS) -> Recording:
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(MASKS))
    return record(engine, manifest, EngineLimits(LENGTH, CAPACITY, REQUESTS, rows))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_calls_cover_full_prefill_chunks_later_requests_and_moves_of_several_requests(
    lowering: Lowering, tmp_path: Path
) -> None:
    """A request continues after an earlier one was cancelled; drafts of several requests are accepted in one call."""
    engine = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, lowering)
    calls, skipped = recorded_on(engine, tmp_path)
    assert not skipped
    assert max(engine.widths) == PREFILL_ROWS
    assert {int(call.arrays["first"][0]) for call in calls} == {0, REQUESTS - 1}
    assert ([0, 1] in engine.moved) == (lowering == "append")


def test_fixed_drafts_have_a_row_for_each_candidate_and_mask_slot(tmp_path: Path) -> None:
    """After the last known token: a chain of 23 candidates, and trees of 12 with their mask slots."""
    engine = HashEngine(Language(1, 70), CAPACITY, REQUESTS)
    calls, _ = recorded_on(engine, tmp_path)
    last = {call.case: call.arrays["logit_rows"].shape[1] for call in calls}
    assert last["prompt, every row"] == 1 + 23
    assert all(last[f"random tree {number}"] > 1 + 12 for number in (1, 2, 3))


def test_moves_are_replayed_as_they_were_recorded(tmp_path: Path) -> None:
    engine = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    calls, _ = recorded_on(engine, tmp_path)
    other = MovedEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    run = replay(other)
    for call in calls:
        assert np.array_equal(run(call.arrays), call.expected, equal_nan=True)
    assert [0, 1] in other.moved


@pytest.mark.parametrize(
    ("window", "expected"), [(16, []), (638, []), (639, ["639 positions: raise --long-context"]), (1024, [])]
)
def test_a_window_that_no_case_exceeds_is_reported(window: int, expected: list[str], tmp_path: Path) -> None:
    """A graph that ignores the window would pass; a window of all positions of the model cannot be exceeded."""
    engine = HashEngine(Language(1, 70, window=window), CAPACITY, REQUESTS, "append")
    _, skipped = recorded_on(engine, tmp_path)
    assert len(skipped) == len(expected)
    assert all(part in line for line, part in zip(skipped, expected, strict=True))


def test_no_call_is_wider_than_the_narrowest_engine(tmp_path: Path) -> None:
    engine = HashEngine(Language(1, 70), CAPACITY, REQUESTS, "append")
    recorded_on(engine, tmp_path, STEP_ROWS)
    assert max(engine.widths) == STEP_ROWS


@pytest.mark.parametrize("length", [64, 192, LENGTH])
def test_rows_use_the_whole_position_table_and_nothing_beyond_it(length: int, tmp_path: Path) -> None:
    """Models with learned positions (gpt2, opt) raise an error for a row beyond their table."""
    engine = HashEngine(Language(1, 70), CAPACITY, REQUESTS)
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(
        fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(MASKS), max_positions=length
    )
    calls, _ = record(engine, manifest, EngineLimits(length, CAPACITY, REQUESTS, PREFILL_ROWS))
    highest = {call.case: 0 for call in calls}
    for call in calls:
        highest[call.case] = max(highest[call.case], int(call.arrays["position_ids"].max()))
    assert max(highest.values()) == highest["up to the last position"] == length - 1
