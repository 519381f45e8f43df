"""Probe: an engine whose logits depend on the number of rows or on the order of slots is recognized, and drafts follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.exactness import tolerated_noise, unmeasured
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.backends.measurements import probe
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import CPU_COSTS, Batch, Costs, Moves
from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

FLOAT = 1e-5  # tolerated noise with float activations


class SlotEngine:
    """Logits of a row depend on the tokens that it sees; they change with the order of slots or from a width on."""

    device = "cpu"
    costs: Costs = CPU_COSTS
    notes: tuple[str, ...] = ()

    def __init__(
        self, order: float = 0.0, width: int = 99, capacity: int = 64, rows: int = 64, factor: float = 1 + 1e-4
    ) -> None:
        self.signature = Signature(1, 1, 1, 50, "float32", "scatter")
        self.capacity, self.rows, self.requests = capacity, rows, 1
        self._order, self._width, self._factor = order, width, factor
        self.slots, self.widths = np.zeros(capacity, np.int64), list[int]()

    def run(self, batch: Batch) -> NDArray[np.float32]:
        assert batch.requests == 1
        count = batch.input_ids.shape[1]
        assert count <= self.rows
        assert batch.slot_ids.max() < self.capacity
        self.widths.append(count)
        self.slots[batch.slot_ids[0]] = batch.input_ids[0]
        seen = self.slots[: batch.attention_mask.shape[-1]] * batch.attention_mask[0, 0]  # rows x slots
        weights = 1 + self._order * np.arange(seen.shape[1])
        sums = (seen * weights).sum(axis=1) + batch.input_ids[0]
        if count >= self._width:
            sums = sums * self._factor
        logits = sums[batch.logit_rows[0], None] / (1 + np.arange(50))
        return logits[None].astype(np.float32)

    def move(self, first: int, moves: Sequence[Moves]) -> None: ...

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        self.slots[: slots.size] = self.slots[slots]

    def clear(self, request: int) -> None:
        self.slots[:] = 0

    def close(self) -> None: ...


def test_an_engine_whose_logits_do_not_depend_on_the_call_drafts_in_trees() -> None:
    engine = SlotEngine()
    found = probe(engine, FLOAT)
    assert (found.rows, found.drafts, found.parallel_threads) == (0.0, "tree", True)
    assert found.widths == (2, 3, 8, 9, 33)
    assert str(found) == "equal up to near-ties (noise 1e-07): draft trees, threads in parallel"
    assert not engine.slots.any()


@pytest.mark.parametrize(("tolerated", "drafts"), [(0.0, "chain"), (1e-9, "chain"), (1.0, "tree")])
def test_logits_that_depend_on_the_order_of_slots_allow_chains_only(tolerated: float, drafts: str) -> None:
    found = probe(SlotEngine(order=1e-3), tolerated)
    assert found.rows == 0
    assert 1e-4 < found.slots < 1e-1
    assert (found.drafts, found.parallel_threads) == (drafts, drafts == "tree")
    assert found.needs_slots_in_order == (drafts == "chain")


@pytest.mark.parametrize("width", [2, 3, 8, 9, 33])
def test_logits_that_depend_on_the_number_of_rows_allow_no_drafts(width: int) -> None:
    found = probe(SlotEngine(width=width), FLOAT)
    assert found.rows == pytest.approx(1e-4, rel=0.01)
    assert (found.drafts, found.parallel_threads) == ("none", False)
    assert str(found) == "not exact (noise 1e-04 with the number of rows): no drafts unless they are requested"
    assert probe(SlotEngine(width=width), 1e-3).drafts == "tree"
    assert probe(SlotEngine(width=width, factor=float("nan")), FLOAT).drafts == "none"


@pytest.mark.parametrize(("capacity", "rows", "widths"), [(64, 4, (2, 3)), (8, 64, (2, 3)), (2, 64, ()), (64, 1, ())])
def test_a_small_engine_is_probed_within_its_limits(capacity: int, rows: int, widths: tuple[int, ...]) -> None:
    assert probe(SlotEngine(capacity=capacity, rows=rows), FLOAT).widths == widths


def test_a_runtime_drafts_nothing_unless_asked_where_drafts_are_not_exact() -> None:
    base = hash_runtime(Language(1, quality=80))
    inexact = replace(unmeasured(base.bundle.manifest), rows=1e-3, widths=(2, 9))
    with base, Runtime(base.bundle, base.engine, base.max_seq_len, exactness=inexact) as runtime:
        (note,) = runtime.notes
        assert note.startswith("drafts are off by default: on this CPU, logits of this bundle change")
        assert base.notes == ()
        usual = base.generate((1, 2, 3), Decoding(max_tokens=30))
        plain = runtime.generate((1, 2, 3), Decoding(max_tokens=30))
        asked = runtime.generate((1, 2, 3), Decoding(max_tokens=30, mask_slots=2))
    assert usual.tokens == plain.tokens == asked.tokens
    assert usual.statistics.candidate_rows > 0
    assert plain.statistics.candidate_rows == 0 < asked.statistics.candidate_rows


@pytest.mark.parametrize("bundle", ["tiny_bundle", "half_bundle", "tiny_int8_bundle"])
def test_default_drafts_of_a_model_are_those_that_its_measured_noise_allows(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(bundle)
    with Runtime.open(path, max_seq_len=128, threads=1, step_costs="free") as runtime:
        found, manifest = runtime.exactness, runtime.bundle.manifest
    assert found.tolerated == tolerated_noise(manifest)
    assert len(found.widths) >= 2
    assert found.rows <= found.tolerated  # kernels compute a row in the same way in every call, on every CPU so far
    assert found.drafts == "tree"
    assert (found.slots == 0) == (manifest.signature.kv_cache == "int8")
