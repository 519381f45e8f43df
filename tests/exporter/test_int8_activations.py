"""int4 weights with int8 activations: draft chains have bit-identical logits to plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.export import ExportOptions, export, with_supported_activations
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import visible_length
from spaceport.graphs.weight_quantization import BLOCKS
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.audit.audit import audit
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from support.cache import built
from support.exported import bundle_of
from support.paths import TINY

pytestmark = pytest.mark.torch  # exports the bundle

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
OPTIONS = ExportOptions("scatter", weights="int4", requested_activations="int8")
START, END = 40, 140  # positions that are fed row by row; the visible length grows at 64 and 128

Array = NDArray[np.int64]
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def bundle() -> Path:
    return bundle_of(TINY, OPTIONS)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return open_engine(open_bundle(bundle), "onnxruntime", EngineOptions(capacity=256, requests=3))


def feed(engine: Engine, tokens: Array, first: int, slots: Array, visible: int, requests: int = 1) -> Logits:
    """The logits of a chain of tokens (requests x rows) after `first` cached tokens."""
    rows = tokens.shape[1]
    mask = np.zeros((rows, visible), np.bool_)
    mask[:, :first] = True
    mask[:, slots] = np.tril(np.ones((rows, rows), np.bool_))
    everywhere = (np.broadcast_to(each, (requests, rows)).copy() for each in (first + np.arange(rows), slots))
    positions, slot_ids = everywhere
    masks = np.broadcast_to(mask, (requests, 1, rows, visible)).copy()
    wanted = np.broadcast_to(np.arange(rows), (requests, rows)).copy()
    return engine.run(Batch(0, tokens, positions, slot_ids, masks, wanted)).copy()


def plain(engine: Engine, tokens: Array) -> Logits:
    """The logits of steps of one row from START on; afterwards the tokens are in the KV cache."""
    feed(engine, tokens[:, :START], 0, np.arange(START), 64)
    rows = [feed(engine, tokens[:, n : n + 1], n, np.array([n]), visible_length(n + 1))[0] for n in range(START, END)]
    return np.concatenate(rows)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("ahead", [0, 64])  # more visible slots, as with mask slots or other requests
def test_logits_of_a_chain_are_bit_identical_to_steps_of_one_row(engine: Engine, requests: int, ahead: int) -> None:
    tokens = np.random.default_rng(0).integers(8, 600, (3, END))
    for request in (2, 1, 0):  # the last one stays in the first request's buffers
        expected = plain(engine, tokens[request : request + 1])
    for rows in (2, 4, 9, 36):
        for first in range(START, END - rows, 7):
            fed = tokens[:requests, first : first + rows]
            visible = visible_length(first + rows + ahead)
            got = feed(engine, fed, first, first + np.arange(rows), visible, requests)[0]
            assert got.tobytes() == expected[first - START : first - START + rows].tobytes()


def test_a_gap_between_the_slots_of_a_chain_changes_its_logits(engine: Engine) -> None:
    """Otherwise the test above would be void, and trees would be exact as well."""
    tokens = np.random.default_rng(0).integers(8, 600, (1, END))
    expected = plain(engine, tokens)
    moved = []
    for first in range(START, END - 2, 7):
        got = feed(engine, tokens[:, first : first + 2], first, np.array([first, first + 3]), visible_length(first + 4))
        plain(engine, tokens)  # writes the second row to its usual slot again
        moved.append(np.abs(got[0] - expected[first - START : first - START + 2]).max(axis=1))
    assert np.array(moved)[:, 0].max() == 0.0
    assert np.array(moved)[:, 1].max() > 0.0


def test_an_int8_activation_bundle_is_lossless_without_noise(bundle: Path) -> None:
    with Runtime.open(bundle, max_seq_len=256, max_requests=3) as runtime:
        prompts = [TokenizedPrompt(1, tuple(runtime.tokens_of(text))) for text in PROMPTS.values()]
        report = audit(runtime, prompts, 24)
    assert report.summary.startswith("lossless")
    assert {one.largest for one in report.noise} == {0.0}
    assert all(row.identical == row.completions for row in report.drafted)
    assert {row.mode for row in report.modes} == {
        *("plain", "plain, sampled", "chain k = 5", "chain k = 1", "chain with lookup", "chain with lookup, sampled")
    }
    assert report.engine.endswith("scatter, drafts as chains")


def test_its_drafts_are_chains_unless_trees_are_requested(bundle: Path) -> None:
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        assert (runtime.exactness.drafts, runtime.exactness.parallel_threads) == ("chain", False)
        manifest, exactness = runtime.bundle.manifest, runtime.exactness
        assert Decoding().drafts_with(manifest, exactness).siblings == 1
        assert Decoding(draft_siblings=3).drafts_with(manifest, exactness).siblings == 3
        (text, *_) = PROMPTS.values()
        drafted = runtime.generate(text, Decoding(max_tokens=48, trace=True))
        assert drafted.tokens == runtime.generate(text, replace(Decoding(max_tokens=48), mask_slots=0)).tokens
        assert drafted.statistics.steps < 48


@pytest.mark.parametrize("block", [pytest.param(32, marks=pytest.mark.nightly), 64])
def test_blocks_whose_rows_depend_on_the_call_are_recognized_and_draft_nothing(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which blocks these are depends on the CPU: 32 without AVX512, 64 on all of them so far."""
    monkeypatch.setitem(BLOCKS, "scatter", (block, 32, 16))
    bundle = built("bundle-blocks", (block, TINY), ["exporter/export.py"], lambda target: export(TINY, target, OPTIONS))
    tokens = np.random.default_rng(0).integers(8, 600, (1, END))
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        expected = plain(runtime.engine, tokens)
        differs = False
        for first in range(START, END - 9, 7):
            chain = feed(runtime.engine, tokens[:, first : first + 9], first, first + np.arange(9), 256)[0]
            differs |= chain.tobytes() != expected[first - START : first - START + 9].tobytes()
        assert (runtime.exactness.rows > 0) == differs
        assert runtime.exactness.drafts == ("none" if differs else "chain")
        assert ("drafts are off" in " ".join(runtime.notes)) == differs
        (text, *_) = PROMPTS.values()
        assert (runtime.generate(text, Decoding(max_tokens=48)).statistics.candidate_rows == 0) == differs


def test_a_model_without_grouped_query_attention_has_float_activations() -> None:
    """For such models ONNX Runtime has another attention kernel for one row than for several."""
    checkpoint = open_checkpoint(TINY, TokenFlags())
    assert with_supported_activations(checkpoint, ExportOptions(weights="int4")).activations == "int8"
    checkpoint.config.num_key_value_heads = checkpoint.config.num_attention_heads
    assert with_supported_activations(checkpoint, ExportOptions(weights="int4")).activations == "float"
    with pytest.raises(OptionFault, match="6 query heads and as many KV heads, and drafts would not be exact"):
        with_supported_activations(checkpoint, ExportOptions(weights="int4", requested_activations="int8"))
    with pytest.raises(OptionFault, match=r"drafts would not be exact; expected int8x2 \(--activations\)"):
        with_supported_activations(checkpoint, ExportOptions(weights="int8", requested_activations="int8"))
    assert with_supported_activations(checkpoint, ExportOptions(weights="int8")).activations == "int8x2"
