"""ONNX Runtime on the CPU: the buffers of a single request are as long as what its rows may see, with no other logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch

CAPACITY = 512
# Rows, slots before them, and visible length of calls that follow each other: a prompt, drafts that lengthen what is
# visible by turns, and new texts, for which less than half of the buffers is enough.
CALLS: tuple[tuple[int, int, int], ...] = (
    (60, 0, 64),
    (1, 60, 64),
    (9, 61, 128),
    (1, 62, 64),
    (9, 63, 128),
    (64, 72, 192),
    (1, 136, 192),
    (1, 30, 64),
)
CALLS += ((3, 0, 64), (100, 3, 448), (1, 103, 128))


def step(rows: int, first: int, visible: int, seed: int) -> Batch:
    """A chain behind the first slots."""
    slots = np.arange(first, first + rows)[None]
    mask = np.arange(visible) <= slots[0][:, None]
    tokens = np.random.default_rng(seed).integers(8, 600, (1, rows))
    return Batch(0, tokens, slots, slots, mask[None, None], np.arange(rows)[None])


def slots_of(engine: OnnxRuntimeEngine) -> int:
    return int(engine._kv.shape[-2])


@pytest.mark.torch
def test_buffers_that_fit_give_the_logits_of_buffers_of_full_length(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    fitted = open_engine(bundle, EngineOptions(CAPACITY, 1))
    full = open_engine(bundle, EngineOptions(CAPACITY, 2))
    lengths = []
    for seed, call in enumerate(CALLS):
        batch = step(*call, seed)
        assert fitted.run(batch).tobytes() == full.run(batch).tobytes()
        lengths.append(slots_of(fitted))
    assert slots_of(full) == CAPACITY
    assert lengths == [64, 64, 128, 128, 128, 192, 192, 64, 64, 448, 128]


@pytest.mark.torch
def test_logits_in_the_memory_of_earlier_calls_are_those_in_new_memory(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    reusing, renewing = (open_engine(bundle, EngineOptions(CAPACITY, 1)) for _ in range(2))
    for seed, call in enumerate(CALLS):
        renewing._logits = renewing._logit_memory = np.empty((0, 0), np.float32)
        batch = step(*call, seed)
        assert reusing.run(batch).tobytes() == renewing.run(batch).tobytes()
    assert reusing._logit_memory.size == 100 * bundle.manifest.signature.vocab_size


@pytest.mark.torch
def test_a_row_that_is_written_behind_what_is_visible_finds_its_slot(tiny_bundle: Path) -> None:
    engine = open_engine(open_bundle(tiny_bundle), EngineOptions(CAPACITY, 1))
    batch = step(2, 0, 64, 0)
    expected: NDArray[np.float32] = engine.run(batch).copy()
    slots = np.array([[0, CAPACITY - 1]])  # a padding row
    got = engine.run(Batch(0, batch.input_ids, batch.position_ids, slots, batch.attention_mask, batch.logit_rows))
    assert slots_of(engine) == CAPACITY
    assert got[0, 0].tobytes() == expected[0, 0].tobytes()


@pytest.mark.torch
def test_what_lies_behind_kept_slots_is_zero(tiny_bundle: Path) -> None:
    """NaN times a weight of 0 is NaN."""
    engine = open_engine(open_bundle(tiny_bundle), EngineOptions(CAPACITY, 1))
    engine.run(step(400, 0, 448, 0))
    engine._memory[:, 100:] = np.nan
    engine.clear(0)
    engine.run(step(5, 0, 64, 0))
    assert np.isfinite(engine.run(step(1, 5, 320, 0))).all()
