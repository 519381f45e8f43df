"""Staging: what a call says is what the block says, whatever fills it up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Signature, visible_length
from spaceport.runtime.backends.staging import CallShape, Staging
from spaceport.runtime.engine import Batch

CAPACITY = 1024


def staging_of(contract: Signature) -> Staging:
    staging = Staging(contract, CAPACITY, 512)
    staging.wanted = 256
    return staging


def signature(lowering: Lowering, window: int | None = None) -> Signature:
    return Signature(2, 2, 8, 100, "float16", lowering, window)


@st.composite
def batches(draw: st.DrawFn, lowering: Lowering, window: int | None) -> Batch:
    """Calls as `pack` makes them: busy requests, idle ones between them."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, rows = draw(st.integers(1, 4)), draw(st.one_of(st.integers(1, 70), st.just(300)))
    wanted = draw(st.integers(1, min(rows, 256)))
    height = draw(st.integers(0, 300))
    visible = visible_length(height + rows)
    idle = np.array([draw(st.booleans()) for _ in range(count)])
    slots = height + np.arange(rows) + np.zeros((count, 1), np.int64)
    if lowering == "scatter":
        slots = dice.permuted(slots, axis=1)
        slots[idle] = CAPACITY - 1
    else:
        slots[idle] = np.arange(CAPACITY - rows, CAPACITY)
    mask = dice.random((count, 1, rows, visible)) < 0.5
    return Batch(
        first=0,
        input_ids=dice.integers(0, 100, (count, rows)),
        position_ids=dice.integers(0, 500, (count, rows)),
        slot_ids=slots,
        attention_mask=mask,
        logit_rows=dice.integers(0, rows, (count, wanted)),
        sliding_attention_mask=mask & (dice.random(mask.shape) < 0.5) if window else None,
    )


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("lowering", LOWERINGS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_call_is_found_in_its_block_and_nothing_else_is_seen(
    lowering: Lowering, window: int | None, data: st.DataObject
) -> None:
    contract = signature(lowering, window)
    staging, block = staging_of(contract), np.full(2_000_000, 0xAB, np.uint8)
    for _ in range(2):  # the second finds what the first has left
        batch = data.draw(batches(lowering, window))
        shape = staging.padded(batch)
        (count, rows), visible = batch.input_ids.shape, batch.attention_mask.shape[-1]
        unpadded = CallShape(count, rows, visible, batch.logit_rows.shape[1])
        assert all(least <= most for least, most in zip(unpadded, shape, strict=True))
        staging.write(batch, shape, block)
        parts = staging.ranges(shape)
        reported = {
            tensor.name: np.ndarray(parts[tensor.name].shape, np.dtype(tensor.dtype), block, parts[tensor.name].offset)
            for tensor in contract.rows
        }
        assert staging.bytes(shape) == max(part.offset + reported[name].nbytes for name, part in parts.items())
        assert all(part.offset % 256 == 0 for part in parts.values())
        for name in ("input_ids", "position_ids"):
            assert np.array_equal(reported[name][:, :rows], getattr(batch, name))
        for name in ("attention_mask", "sliding_attention_mask")[: 2 if window else 1]:
            assert np.array_equal(reported[name][:, :, :rows, :visible], getattr(batch, name))
            assert not reported[name][:, :, :rows, visible:].any()
            assert reported[name][:, :, rows:, 0].all()
            assert not reported[name][:, :, rows:, 1:].any()
        assert np.array_equal(reported["logit_rows"][:, : batch.logit_rows.shape[1]], batch.logit_rows)
        assert reported["logit_rows"].max() < shape.rows
        check_slots(lowering, batch, reported["slot_ids"], shape)
        assert (reported["input_ids"][:, rows:] == 0).all()
        assert count == shape.requests


def check_slots(lowering: Lowering, batch: Batch, slots: NDArray[np.int64], shape: CallShape) -> None:
    rows = batch.input_ids.shape[1]
    if lowering == "scatter":
        assert np.array_equal(slots[:, :rows], batch.slot_ids)
        assert (slots[:, rows:] == CAPACITY - 1).all()
        return
    assert (np.diff(slots, axis=1) == 1).all()
    assert slots.max() < CAPACITY
    idle = batch.slot_ids[:, 0] == CAPACITY - rows
    assert np.array_equal(slots[~idle, 0], batch.slot_ids[~idle, 0])
    assert (slots[idle, 0] == CAPACITY - shape.rows).all()


def batch_of(rows: int, visible: int, first: int = 0) -> Batch:
    ids = np.zeros((1, rows), np.int64)
    return Batch(0, ids, ids, first + np.arange(rows)[None], np.ones((1, 1, rows, visible), np.bool_), ids[:, :1])


def test_a_run_is_filled_up_only_as_far_as_the_buffer_goes() -> None:
    batch = batch_of(10, CAPACITY, CAPACITY - 11)
    assert staging_of(signature("append")).padded(batch) == CallShape(1, 11, CAPACITY, 1)
    assert staging_of(signature("scatter")).padded(batch) == CallShape(1, 12, CAPACITY, 1)


def test_rows_and_visible_lengths_come_in_few_sizes() -> None:
    """Visible lengths are at most a quarter longer."""
    staging = staging_of(signature("scatter"))
    filled = {1: 1, 3: 4, 7: 9, 17: 20, 36: 36, 37: 48, 65: 128, 200: 256, 512: 512}
    assert filled == {rows: staging.padded(batch_of(rows, 64)).rows for rows in filled}
    filled = {64: 64, 320: 320, 448: 448, 576: 640, 704: 768, 832: 896, 960: 1024, 1024: 1024}
    assert filled == {length: staging.padded(batch_of(1, length)).visible for length in filled}
