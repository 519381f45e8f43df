"""Cases: the recorded calls cover what a runtime does, within the limits of all engines, and are replayed as recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.runtime.engine import PREFILL_ROWS, Batch, Moves
from spaceport.verify.cases import REQUESTS, SHORTEST, EngineLimits, Recording, record
from spaceport.verify.check import limits_of
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.small_bundle import RECORD, fill

LENGTH = 647  # the longest prompt ends a row before a call of 128 is full
CAPACITY = visible_length(LENGTH + 64 + STEP_ROWS + PREFILL_ROWS + 1)
LIMITS = EngineLimits(LENGTH, CAPACITY, REQUESTS, PREFILL_ROWS)
TOKENS = TokenIds(MASKS, FORK, CHILD, (END,))


@dataclass
class MovedEngine(HashEngine):
    """A fake engine that records which requests' KV slots move in each call."""

    moved: list[list[int]] = field(default_factory=list)

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        super().move(first, moves)
        if busy := [request for request, (sources, _) in enumerate(moves, first) if sources.size]:
            self.moved.append(busy)


def engine_of(lowering: Lowering = "append", capacity: int = CAPACITY, **options: Any) -> MovedEngine:
    return MovedEngine(Language(1, 70, window=options.pop("window", None)), capacity, REQUESTS, lowering, **options)


def recorded_on(
    engine: HashEngine,
    folder: Path,
    limits: EngineLimits = LIMITS,
    tokens: TokenIds = TOKENS,
    seed: int = 0,
    **manifest: int,
) -> Recording:
    changes: dict[str, Any] = {"drafts": DraftMethod(max_tokens=len(tokens.mask)), **manifest}
    return record(engine, replace(fill(folder), signature=engine.signature, tokens=tokens, **changes), limits, seed)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_calls_cover_full_prefill_chunks_later_requests_and_moves_of_several_and_are_replayed_as_recorded(
    lowering: Lowering, tmp_path: Path
) -> None:
    """A request continues after an earlier one was cancelled; drafts of several requests are accepted in one call."""
    engine = engine_of(lowering)
    calls, skipped = recorded_on(engine, tmp_path)
    assert not skipped
    assert max(engine.widths) == PREFILL_ROWS
    assert {call.batch.first for call in calls} == {0, REQUESTS - 1}
    assert ([0, 1] in engine.moved) == (lowering == "append")
    last = {call.case: call.batch.logit_rows.shape[1] for call in calls}
    assert last["prompt, every row"] == 1 + 23  # a chain of 23 candidates
    assert all(last[f"random tree {number}"] > 1 + 12 for number in (1, 2, 3))  # 12 candidates with their mask slots
    other = engine_of(lowering)
    for call in calls:
        assert np.array_equal(call.run(other), call.expected, equal_nan=True)
    assert ([0, 1] in other.moved) == (lowering == "append")
    narrow = engine_of(lowering)
    recorded_on(narrow, tmp_path, replace(LIMITS, rows=STEP_ROWS))
    assert max(narrow.widths) == STEP_ROWS


@pytest.mark.parametrize("tokens", [TOKENS, TokenIds(MASKS), TokenIds()])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_kind_of_call_is_among_the_cases(tokens: TokenIds, lowering: Lowering, tmp_path: Path) -> None:
    """On an engine that refuses wrong attention masks; [Fork] and its [Child] are fed in the same step."""
    limits = EngineLimits(64, visible_length(64 + STEP_ROWS + 1), REQUESTS, 512)
    engine = engine_of(lowering, limits.capacity, masks=tokens.mask)
    calls, skipped = recorded_on(engine, tmp_path, limits, tokens)
    assert len(calls) == engine.calls
    assert not skipped
    fork, child = (FORK, CHILD) if tokens.fork is not None else (0, 1)
    shared = [same_call_forks(call.batch, fork, child) for call in calls if call.case.startswith("forked threads")]
    assert sum(map(bool, shared)) >= 2
    assert any(call.case.startswith("draft trees") for call in calls) == bool(tokens.mask)


def same_call_forks(batch: Batch, fork: int, child: int) -> int:
    """Number of [Child] rows that see their [Fork] row in the same call."""
    ids, positions, mask = batch.input_ids[0], batch.position_ids[0], batch.attention_mask[0, 0]
    slots = batch.slot_ids[0]
    return sum(
        bool(mask[row, slots[other]]) and positions[row] == positions[other] + 1
        for row in np.flatnonzero(ids == child)
        for other in np.flatnonzero(ids[:row] == fork)
    )


@pytest.mark.parametrize(
    ("window", "expected"), [(16, []), (638, []), (639, ["639 positions: raise --long-context"]), (1024, [])]
)
def test_a_window_that_no_case_exceeds_is_reported(window: int, expected: list[str], tmp_path: Path) -> None:
    """A graph that ignores the window would pass; a window of all positions of the model cannot be exceeded."""
    _, skipped = recorded_on(engine_of(window=window), tmp_path)
    assert len(skipped) == len(expected)
    assert all(part in line for line, part in zip(skipped, expected, strict=True))


@pytest.mark.parametrize("length", [64, 192, LENGTH])
def test_rows_use_the_whole_position_table_and_nothing_beyond_it(length: int, tmp_path: Path) -> None:
    """Models with learned positions (gpt2, opt) raise an error for a row beyond their table."""
    calls, _ = recorded_on(engine_of("scatter"), tmp_path, replace(LIMITS, length=length), max_positions=length)
    highest = {call.case: 0 for call in calls}
    for call in calls:
        highest[call.case] = max(highest[call.case], int(call.batch.position_ids.max()))
    assert max(highest.values()) == highest["up to the last position"] == length - 1


@pytest.mark.parametrize(("requests", "skipped"), [(REQUESTS, 0), (2, 1), (1, 3)])
def test_the_cases_stay_within_the_limits_of_all_engines(requests: int, skipped: int, tmp_path: Path) -> None:
    found = recorded_on(engine_of(capacity=1024), tmp_path, EngineLimits(64, 320, requests, 16))
    assert len(found.skipped) == skipped
    for call in found.calls:
        assert call.batch.slot_ids.max() < 320
        assert call.batch.first + call.batch.requests <= requests
    rows = [call.batch.input_ids.shape[1] for call in found.calls if call.case.startswith("long context")]
    assert rows[0] == max(rows) == 16


def test_calls_have_each_row_count_of_default_drafts_and_drawn_ones_up_to_the_largest(tmp_path: Path) -> None:
    def row_counts(seed: int, limits: EngineLimits = LIMITS) -> list[int]:
        calls, _ = recorded_on(engine_of(), tmp_path, limits, seed=seed)
        return [call.batch.input_ids.shape[1] for call in calls if "SPACE" not in call.case]

    assert row_counts(1) == row_counts(1)
    drawn = [set(row_counts(seed)) for seed in range(4)]
    assert all(counts >= {*range(1, 25), PREFILL_ROWS} for counts in drawn)
    assert len(set.union(*drawn) - set(range(25))) > 15
    for length in (SHORTEST, 64):
        assert set(row_counts(0, replace(LIMITS, length=length))) >= set(range(1, 25))


def test_the_limits_are_the_sizes_that_the_engines_were_built_for(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    manifest = replace(manifest, signature=replace(manifest.signature, lowering="append"))
    none = limits_of(manifest, None, [])
    assert (none.length, none.requests, none.rows) == (1024, REQUESTS, 512)
    small = replace(RECORD, capacity=896, requests=1, prefill_rows=128)
    limits = limits_of(manifest, None, [RECORD, small])
    assert (limits.capacity, limits.requests, limits.rows) == (896, 1, 128)
    assert limits_of(manifest, limits.length + 1, [small]).capacity > 896, "a requested length is never reduced"
    assert limits_of(manifest, None, [replace(RECORD, capacity=64)]).length == SHORTEST
