"""Families: the graph of every family, in PyTorch and in ONNX Runtime, compared with the unmodified transformers model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.to_onnx import UntraceableModel
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.signature import Lowering, Precision, Signature, visible_length
from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.traits import UnsupportedModel, probe
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, session_options
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.engine import Batch, Engine
from support.families import FAMILIES, REFUSED, VOCAB, WINDOW, Family, Refused, build, decoder_for, family_of, graph_of
from support.published import write_checkpoint

FLOAT_TOLERANCE = 1e-4  # of a logit; rounding explains 1e-5
HALF_TOLERANCE = 2e-2  # of the largest logit
WRONG_MASK_DIFFERENCE = 1e-2  # a wrong mask changes some logit by more than this

SLOTS = 192
REQUESTS = 2

# The nine rows of a SPACE step with two mask slots, x m01 m02 c1 m11 m12 c2 m21 m22: their parents and the mask slots.
SPACE = (-1, 0, 1, 0, 3, 4, 3, 6, 7)
MASKS = (1, 2, 4, 5, 7, 8)
MASK = 5  # an ordinary token: to the graph a mask slot is a row like any other


@dataclass(frozen=True, eq=False)
class Row:
    """A token in a KV slot, and the rows that it sees: its path from the root."""

    token: int
    slot: int
    ancestors: tuple[Row, ...]

    @property
    def path(self) -> tuple[Row, ...]:
        return (*self.ancestors, self)


class Text:
    """The free slots of a request: used in random order, or consecutively for the append lowering."""

    def __init__(self, signature: Signature, random: np.random.Generator) -> None:
        self._random = random
        # the last slot is where padding rows write
        order = np.arange(SLOTS - 1) if signature.lowering == "append" else random.permutation(SLOTS - 1)
        self._free: list[int] = order.tolist()

    def add_rows(
        self, parents: Sequence[int], ancestors: tuple[Row, ...] = (), below: int = SLOTS, masks: Collection[int] = ()
    ) -> list[Row]:
        """New rows in slots below a limit; a parent is an index among them, or -1 for the last of `ancestors`."""
        slots = [slot for slot in self._free if slot < below][: len(parents)]
        self._free = [slot for slot in self._free if slot not in slots]
        rows: list[Row] = []
        for index, (parent, slot) in enumerate(zip(parents, slots, strict=True)):
            token = MASK if index in masks else int(self._random.integers(VOCAB))
            rows.append(Row(token, slot, ancestors if parent < 0 else rows[parent].path))
        return rows

    def add_tree(self, count: int, ancestors: tuple[Row, ...], below: int) -> list[Row]:
        return self.add_rows([int(self._random.integers(-1, row)) for row in range(count)], ancestors, below)


def chain(count: int) -> range:
    """The parents of the rows of a chain."""
    return range(-1, count - 1)


def batch_of(signature: Signature, requests: Sequence[Sequence[Row]]) -> Batch:
    """The inputs for these rows; logits are requested in reverse order."""
    shape = (len(requests), max(map(len, requests)))
    visible = visible_length(1 + max(cell.slot for rows in requests for row in rows for cell in row.path))
    mask = np.zeros((shape[0], 1, shape[1], visible), np.bool_)  # B x 1 x T x A, True = may see
    mask[..., 0] = True  # what padding rows see
    near = mask.copy()
    ids, positions, wanted = (np.zeros(shape, np.int64) for _ in range(3))
    batch = Batch(0, ids, positions, np.full(shape, SLOTS - 1, np.int64), mask, wanted, near)
    for request, rows in enumerate(requests):
        wanted[request, : len(rows)] = np.arange(len(rows))[::-1]
        if signature.lowering == "append":
            batch.slot_ids[request] = rows[0].slot + np.arange(shape[1])
        for index, row in enumerate(rows):
            seen = [cell.slot for cell in row.path]
            ids[request, index], positions[request, index] = row.token, len(row.ancestors)
            batch.slot_ids[request, index] = row.slot
            mask[request, 0, index] = np.isin(np.arange(visible), seen)
            near[request, 0, index] = np.isin(np.arange(visible), seen[-(signature.window or 0) :])
    return batch


@dataclass(frozen=True)
class Pair:
    """A graph and the model that it is made from."""

    engine: Engine
    reference: PreTrainedModel

    @property
    def signature(self) -> Signature:
        return self.engine.signature

    def flood(self, random: np.random.Generator) -> None:
        """Fill all slots with rows that no later row may see."""
        shape = (REQUESTS, SLOTS)
        mask = np.ones((REQUESTS, 1, SLOTS, SLOTS), np.bool_)
        ids, positions = random.integers(VOCAB, size=shape), random.integers(SLOTS, size=shape)
        slots, wanted = np.tile(np.arange(SLOTS), (REQUESTS, 1)), np.zeros((REQUESTS, 1), np.int64)
        self.engine.run(Batch(0, ids, positions, slots, mask, wanted, mask))

    def difference(self, *requests: Sequence[Row], batch: Batch | None = None, relative: bool = False) -> float:
        """The largest difference between any logits of these rows and those of the unmodified model."""
        logits = self.engine.run(batch or batch_of(self.signature, requests))
        worst = 0.0
        for request, rows in enumerate(requests):
            expected = self.expected(rows)
            found = np.abs(logits[request, : len(rows)][::-1] - expected).max()
            worst = max(worst, float(found / np.abs(expected).max() if relative else found))
        return worst

    def expected(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """The logits of the unmodified model for each row, computed from the path to the row alone."""
        logits: dict[Row, NDArray[np.float32]] = {}
        for row in sorted(rows, key=lambda row: -len(row.ancestors)):
            if row not in logits:
                ids = torch.tensor([[cell.token for cell in row.path]])
                with torch.no_grad():
                    result = self.reference(input_ids=ids, use_cache=False).logits[0].numpy()
                logits.update(zip(row.path, result, strict=True))
        return np.stack([logits[row] for row in rows])


def pair_of(family: Family, lowering: Lowering, dtype: Precision = "float32", in_torch: bool = False) -> Pair:
    """The family's graph in an engine, and the unmodified model with the same weights."""
    model = build(family, torch.float16 if dtype == "float16" else torch.float32)
    reference = build(family, attention="eager")
    reference.load_state_dict(model.state_dict())
    if in_torch:
        decoder = decoder_for(family, model, lowering)
        return Pair(TorchEngine(decoder, decoder.signature, SLOTS, REQUESTS, "cpu"), reference)
    graph, signature = graph_of(family, model, lowering)
    session = ort.InferenceSession(graph, session_options(1), providers=["CPUExecutionProvider"])
    return Pair(OnnxRuntimeEngine(session, signature, SLOTS, REQUESTS), reference)


def require_equal_logits(pair: Pair, tolerance: float, relative: bool = False) -> None:
    """Assert that the logits of each kind of step of two texts are those of the unmodified model."""
    random = np.random.default_rng(3)
    pair.flood(random)
    one, two = Text(pair.signature, random), Text(pair.signature, random)

    step = partial(pair.difference, relative=relative)
    found = {}
    prompt = one.add_rows(chain(51), below=64)
    found["prompt of 51 rows"] = step(prompt)
    (single,) = one.add_rows([-1], prompt[-1].path, below=64)
    found["cached row"] = step([single])
    space = one.add_rows(SPACE, single.path, below=64, masks=MASKS)
    found["SPACE step"] = step(space)
    wide = one.add_tree(20, space[3].path, below=128)  # only c1 was accepted
    found["tree of 20 rows, past slot 64"] = step(wide)
    deepest = max(wide, key=lambda row: len(row.ancestors))
    few, other = one.add_tree(6, deepest.path, below=128), two.add_rows(chain(23), below=64)
    found["6 rows and a prompt of 23 rows"] = step(few, other)
    late, drafted = one.add_rows([-1], few[0].path), two.add_rows(SPACE, other[-1].path, below=64, masks=MASKS)
    found["1 row and a SPACE step"] = step(late, drafted)
    found["chunk of 60 rows, all slots visible"] = step(one.add_rows(chain(60), late[0].path))
    print(f"largest difference {max(found.values()):.1e}")  # pytest -rP shows it
    assert {step: worst for step, worst in found.items() if not worst <= tolerance} == {}


def space_step(pair: Pair) -> list[Row]:
    """The rows of a SPACE step after a text that is longer than the window; they are not run yet."""
    random = np.random.default_rng(4)
    pair.flood(random)
    text = Text(pair.signature, random)
    prompt = text.add_rows(chain(40))
    pair.engine.run(batch_of(pair.signature, [prompt]))
    return text.add_rows(SPACE, prompt[-1].path, masks=MASKS)


def difference_with(pair: Pair, rows: list[Row], row: int, slot: int, visible: bool) -> float:
    """The difference of the logits when one cell of both masks is another one."""
    batch = batch_of(pair.signature, [rows])
    assert batch.sliding_attention_mask is not None
    batch.attention_mask[0, 0, row, slot] = batch.sliding_attention_mask[0, 0, row, slot] = visible
    return pair.difference(rows, batch=batch)


def require_sensitive_masks(pair: Pair) -> None:
    """Assert that the logits change if the first row does not see the token two before it: equality proves something."""
    rows = space_step(pair)
    assert difference_with(pair, rows, 0, rows[0].ancestors[-2].slot, False) > WRONG_MASK_DIFFERENCE


def by_tier(family: Family, lowering: Lowering, each_run: Lowering | None) -> object:
    """A case of each run if this is its lowering, otherwise a nightly one."""
    return pytest.param(family, lowering, marks=() if lowering == each_run else pytest.mark.nightly)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_module_that_is_exported_has_the_logits_of_the_unmodified_model(family: Family) -> None:
    for lowering in family.lowerings:
        pair = pair_of(family, lowering, in_torch=True)
        require_equal_logits(pair, FLOAT_TOLERANCE)
        require_sensitive_masks(pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lowering"),
    [by_tier(family, lowering, family.each_run) for family in FAMILIES for lowering in family.lowerings],
    ids=str,
)
def test_a_graph_has_the_logits_of_the_unmodified_model(family: Family, lowering: Lowering) -> None:
    pair = pair_of(family, lowering)
    require_equal_logits(pair, FLOAT_TOLERANCE)
    require_sensitive_masks(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "lowering"), [("llama", "scatter"), ("qwen3", "append"), ("gemma2", "scatter")])
def test_a_half_precision_graph_is_within_tolerance_of_the_model(name: str, lowering: Lowering) -> None:
    require_equal_logits(pair_of(family_of(name), lowering, "float16"), HALF_TOLERANCE, relative=True)


@pytest.mark.parametrize(("name", "lowering"), [("mistral", "scatter"), ("gemma2", "append")])
def test_a_window_wrong_by_one_and_a_visible_sibling_change_the_logits(name: str, lowering: Lowering) -> None:
    pair = pair_of(family_of(name), lowering, in_torch=True)
    rows = space_step(pair)
    for wrong in (WINDOW - 1, WINDOW + 1):
        batch = batch_of(replace(pair.signature, window=wrong), [rows])
        assert pair.difference(rows, batch=batch) > WRONG_MASK_DIFFERENCE
    m01, c1 = 1, 3  # both are children of x
    assert difference_with(pair, rows, c1, rows[m01].slot, True) > WRONG_MASK_DIFFERENCE
    assert pair.difference(rows) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_a_model_that_cannot_be_exported_exactly_is_refused_with_the_reason(refused: Refused, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    family = replace(refused.family, options={**refused.family.options, "vocab_size": 640})  # as the tokenizer's
    checkpoint = write_checkpoint(tmp_path / "checkpoint", build(family))
    with pytest.raises((CheckpointError, UnsupportedModel, UntraceableModel), match=refused.reason) as raised:
        export(checkpoint, bundle, ExportOptions())
    assert "\n" not in str(raised.value)
    assert not bundle.exists()


def test_a_model_whose_attention_cannot_be_replaced_cannot_use_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    (family,) = [family for family in FAMILIES if not family.replaceable]
    eager = replace(probe(build(family)), attention_hook="eager")  # from transformers 5.24 on, it can be replaced
    monkeypatch.setattr("spaceport.graphs.decoder.probe", lambda model: eager)
    with pytest.raises(UnsupportedModel, match=r"use plain attention \(--attention plain\)"):
        decoder_of(build(family), "append", "operator")
