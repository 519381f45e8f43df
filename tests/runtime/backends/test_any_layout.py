"""Any layout: with 8-bit keys and values, logits are a function of the tokens that a row sees, to the bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch, EngineOptions
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.audit import audit
from spaceport.tools.verify.prompts import TokenizedPrompt
from support.exported import bundle_of
from support.paths import TINY

SLOTS, REQUESTS, LENGTH = 256, 3, 70
TEXT = np.random.default_rng(1).integers(3, 600, LENGTH)


def bundle() -> str:
    return str(bundle_of(TINY, ExportOptions(weights="int8")))


@cache
def engine() -> OnnxRuntimeEngine:
    return open_engine(open_bundle(bundle()), EngineOptions(SLOTS, REQUESTS))


@cache
def alone() -> NDArray[np.float32]:
    """The logits of the text, fed token by token into the lowest slots."""
    found = []
    for row in range(LENGTH):
        mask = np.arange(visible_length(row + 1)) <= row
        one = np.array([[row]])
        batch = Batch(0, TEXT[None, [row]], one, one, mask[None, None, None], np.array([[0]]))
        found.append(engine().run(batch)[0, 0].copy())
    return np.stack(found)


@settings(max_examples=40)
@given(data=st.data())
def test_a_text_in_any_slots_and_calls_beside_any_other_rows_has_the_same_logits(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    widths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12), "rows of each call")
    others = data.draw(st.integers(0, 12), "other rows of the request in each call")
    requests = data.draw(st.integers(1, REQUESTS), "requests")
    dice = np.random.default_rng(seed)
    places = dice.permutation(SLOTS)
    slots, free = places[:LENGTH], places[LENGTH:]
    mine, start = int(dice.integers(requests)), 0
    while start < LENGTH:
        rows = np.arange(start, min(LENGTH, start + widths[0]))
        widths = [*widths[1:], widths[0]]
        count = rows.size + others
        shape = (requests, count)
        tokens = dice.integers(3, 600, shape)
        positions = dice.integers(0, LENGTH, shape)
        targets = np.stack([dice.permutation(SLOTS)[:count] for _ in range(requests)])
        mask = dice.random((requests, 1, count, SLOTS)) < 0.3
        order = dice.permutation(count)[: rows.size]  # where the rows of the text are in this call
        tokens[mine, order], positions[mine, order] = TEXT[rows], rows
        targets[mine] = free[:count]
        targets[mine, order] = slots[rows]
        mask[mine, 0, order] = False
        for place, row in zip(order, rows, strict=True):
            mask[mine, 0, place, slots[: row + 1]] = True
        wanted = np.tile(np.arange(count), (requests, 1))
        logits = engine().run(Batch(0, tokens, positions, targets, mask, wanted))
        assert np.array_equal(logits[mine, order], alone()[rows])
        start += rows.size


@pytest.mark.slow
def test_drafts_and_threads_in_any_shape_are_lossless_without_noise() -> None:
    with Runtime.open(bundle(), max_seq_len=256, max_requests=3) as runtime:
        assert runtime.exactness.drafts == "tree"
        prompts = ["def scan(text):", "import json\n"]
        report = audit(runtime, [TokenizedPrompt(1, tuple(runtime.tokens_of(text))) for text in prompts], 24)
    assert report.summary.startswith("lossless")
    assert {one.largest for one in report.noise} == {0.0}
    assert all(row.identical == row.completions for row in report.drafted)
    assert any("tree" in row.mode for row in report.modes)
