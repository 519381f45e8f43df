"""Quantized weights: engines dequantize to the weights of PyTorch, and drafts stay exact."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from spaceport.exporter.bundle_files import write_manifest
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.constant_key import WeightNotFound
from spaceport.exporter.export import ExportOptions, export, with_supported_activations
from spaceport.exporter.quantized_weights import store_quantized_weights
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import Weights, visible_length
from spaceport.graphs.weight_quantization import BLOCKS, Quantization, QuantizedWeight, quantize_weight
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, session_options
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.steps import chain_batch
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, USAGE
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.audit.audit import audit
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.check.quantization import measure_quantization
from support.cache import built
from support.exported import bundle_of
from support.families import build, family_of
from support.paths import TINY
from support.published import write_checkpoint
from support.small_graphs import Array, changed, model_of, op, outputs_of

SLOTS = 128
INT4 = ExportOptions("scatter", "float32", "int4")
FLOAT8 = ExportOptions("append", "float16", "float8")
BFLOAT16 = ExportOptions("scatter", "bfloat16", "same")
BFLOAT16_INT4 = ExportOptions("append", "bfloat16", "int4")

Capture = pytest.CaptureFixture[str]


def exported(kind: ExportOptions) -> Path:
    return bundle_of(TINY, kind)


def graph_of(bundle: Path) -> onnx.GraphProto:
    return onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph


def in_float32(bundle: Path, target: Path) -> Path:
    """A copy of a bfloat16 bundle whose graph has the same nodes and the same values of constants, all in float32."""
    shutil.copytree(bundle, target, ignore=shutil.ignore_patterns(MANIFEST_FILE, f"{MODEL_FILE}*"))
    model = onnx.load(str(bundle / MODEL_FILE))
    for tensor in model.graph.initializer:
        widen(tensor)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                widen(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    onnx.save(model, str(target / MODEL_FILE))
    manifest = read_manifest(bundle)
    write_manifest(target, replace(manifest, signature=replace(manifest.signature, dtype="float32")))
    return target


def widen(tensor: TensorProto) -> None:
    """The same numbers in float32, which represents every bfloat16."""
    if tensor.data_type == TensorProto.BFLOAT16:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def session_of(model: str | bytes, weights: Weights, optimized: Path | None = None) -> ort.InferenceSession:
    """A session for a graph with the options of the runtime."""
    options = session_options(1, weights)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def difference(bundle: Path, checkpoint: Path = TINY, runs: Path | None = None) -> float:
    """The largest difference, relative to the largest logit, between a graph and PyTorch in float32 over three calls."""
    opened = open_bundle(bundle)
    reference = open_reference(opened, checkpoint, SLOTS, 1, "float32")
    signature = open_bundle(runs or bundle).manifest.signature
    engine = OnnxRuntimeEngine(
        session_of(str((runs or bundle) / MODEL_FILE), opened.manifest.weights), signature, SLOTS, 1
    )
    dice, worst = np.random.default_rng(5), 0.0
    for rows, context in ((40, 0), (9, 40), (1, 49)):
        batch = chain_batch(reference, rows, context, dice)
        expected, got = reference.run(batch).copy(), engine.run(batch)
        worst = max(worst, float(np.abs(expected - got).max() / np.abs(expected).max()))
    return worst


def test_engines_dequantize_to_the_weights_of_pytorch() -> None:
    assert difference(exported(INT4)) < 1e-5
    assert difference(exported(FLOAT8)) < 4e-3  # the graph computes in float16


@pytest.mark.nightly
def test_a_bfloat16_graph_run_in_float32_has_the_logits_of_pytorch(tmp_path: Path) -> None:
    bundle = exported(BFLOAT16)
    # the reference takes its weights from the checkpoint, which is float16: bfloat16 holds fewer bits of them
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(TINY / "model.safetensors").items()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert difference(bundle, checkpoint, in_float32(bundle, tmp_path / "wide")) < 1e-5
    small = exported(BFLOAT16_INT4)  # in bfloat16 each dequantized weight is rounded once more
    assert difference(small, TINY, in_float32(small, tmp_path / "small")) < 2e-2


@pytest.mark.parametrize(
    ("kind", "softmaxes"), [(BFLOAT16_INT4, 0), pytest.param(BFLOAT16, 3, marks=pytest.mark.nightly)]
)
def test_norms_rotary_embeddings_and_softmax_compute_in_float32(kind: ExportOptions, softmaxes: int) -> None:
    graph = onnx.shape_inference.infer_shapes(
        onnx.load(str(exported(kind) / MODEL_FILE), load_external_data=False)
    ).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    assert {types[n.input[0]] for n in graph.node if n.op_type in ("Cos", "Sin", "Softmax")} == {TensorProto.FLOAT}
    assert sum(node.op_type == "Softmax" for node in graph.node) == softmaxes
    norms = [node for node in graph.node if node.op_type == "RMSNormalization"]
    stash = {attribute.i for node in norms for attribute in node.attribute if attribute.name == "stash_type"}
    assert (len(norms), stash) == (7, {TensorProto.FLOAT})


def test_quantized_weights_are_fused_for_onnxruntime_and_used_without_dequantization(tmp_path: Path) -> None:
    bundle = exported(INT4)
    kinds = Counter(node.op_type for node in graph_of(bundle).node)
    # q k v, o, gate up, down of three layers, and the output embedding
    assert (kinds["DequantizeLinear"], kinds["Split"]) == (4 * 3 + 1, 2 * 3)
    types = {tensor.name: tensor.data_type for tensor in graph_of(bundle).initializer}
    codes = [types[node.input[0]] for node in graph_of(bundle).node if node.op_type == "DequantizeLinear"]
    assert set(codes) == {TensorProto.INT4}
    session_of(str(bundle / MODEL_FILE), "int4", tmp_path / "optimized.onnx")
    ran = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node)
    assert (ran["MatMulNBits"], ran["DequantizeLinear"], ran["Gather"]) == (4 * 3 + 1, 0, 2)
    tables = {tuple(tensor.dims): tensor.data_type for tensor in graph_of(bundle).initializer}
    assert tables[640, 96] == TensorProto.INT8  # the input embedding, with a scale for each token
    assert tables[640, 1] == TensorProto.FLOAT
    assert open_bundle(bundle).manifest.embeddings == "int4"
    kinds = Counter(node.op_type for node in graph_of(exported(FLOAT8)).node)
    assert (kinds["DequantizeLinear"], kinds["Split"]) == (7 * 3, 0)  # TensorRT fuses matmuls by itself


@pytest.mark.parametrize("kind", [INT4, FLOAT8, BFLOAT16_INT4], ids=["int4", "float8", "bfloat16 int4"])
def test_drafts_do_not_change_the_output_with_quantized_weights(kind: ExportOptions, tmp_path: Path) -> None:
    folder = exported(kind)
    bundle = open_bundle(in_float32(folder, tmp_path / "wide") if kind.dtype == "bfloat16" else folder)
    session = session_of(str(bundle.path / MODEL_FILE), kind.weights)
    prompts = ["def scan(text):", *json.loads((TINY / "prompts.json").read_text("utf-8")).values()]
    with Runtime(bundle, OnnxRuntimeEngine(session, bundle.manifest.signature, 320, 1), 256) as runtime:
        for drafting in (Decoding(mask_slots=5, max_tokens=64), Decoding(mask_slots=2, draft="chain", max_tokens=64)):
            saved = 0
            for prompt in prompts:
                plain = runtime.generate(prompt, Decoding(mask_slots=0, max_tokens=64))
                drafted = runtime.generate(prompt, drafting)
                assert drafted.tokens == plain.tokens
                saved += plain.statistics.steps - drafted.statistics.steps
            assert saved > 64  # steps: otherwise no draft token was accepted


@pytest.mark.parametrize("inputs", [96, 192])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_int4_blocks_of_scatter_give_bit_identical_rows_in_every_call(inputs: int, dtype: type) -> None:
    weight = torch.randn(160, inputs, generator=torch.Generator().manual_seed(0))
    layer = quantize_weight(
        weight.to(torch.float16 if dtype is np.float16 else weight.dtype), "int4", BLOCKS["scatter"]
    )
    assert layer is not None
    small = stored(matmul_graph("MatMul", layer.dequantized.numpy(), inputs), layer)
    x: Array = np.random.default_rng(1).standard_normal((9, inputs)).astype(dtype)
    (together,) = outputs_of(small, {"x": x})
    for row in range(9):
        assert together[row].tobytes() == outputs_of(small, {"x": x[row : row + 1]})[0].tobytes()


def test_float8_is_more_accurate_than_int4() -> None:
    int4 = measure_quantization(open_bundle(exported(INT4)), TINY)
    float8 = measure_quantization(open_bundle(exported(FLOAT8)), TINY)
    assert int4 is not None
    assert float8 is not None
    assert int4.rows == float8.rows == 256
    assert 0 < float8.divergence < int4.divergence / 4
    assert int4.agreeing < float8.agreeing < 256
    assert measure_quantization(open_bundle(exported(BFLOAT16)), TINY) is None


@pytest.mark.parametrize(
    ("kind", "target", "older", "message"),
    [
        (FLOAT8, "sm89", "sm80", "--target is sm80: float8 needs sm89 or newer; .* exported without --weights float8"),
        (BFLOAT16_INT4, "sm80", "sm75", "is sm75: bfloat16 needs sm80 or newer; .* exported without --dtype bfloat16"),
    ],
    ids=["float8", "bfloat16"],
)
def test_tensorrt_rtx_builds_an_engine_for_targets_with_the_type(
    kind: ExportOptions,
    target: str,
    older: str,
    message: str,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bundle = shutil.copytree(exported(kind), tmp_path / "bundle")
    build = ["build", str(bundle), "--backend", "tensorrt-rtx", "--max-seq-len", "256", "--target"]
    assert run([*build, f"sm89,{older}"]) == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not open_bundle(bundle).manifest.engines
    assert run([*build, target]) == 0
    assert [record.target for record in open_bundle(bundle).manifest.engines.values()] == [target]


def test_an_error_for_a_weight_missing_from_the_graph_names_its_layer() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}), ir_version=11)
    layer = QuantizedWeight(torch.ones(32, 2, dtype=torch.int8), torch.ones(1, 2), 32)
    with pytest.raises(WeightNotFound, match=r"no matmul with the unchanged weight of model\.up"):
        store_quantized_weights(model, Quantization("int4", {"model.up": layer}))


def matmul_graph(operator: str, weight: Array, inputs: int, **attributes: Any) -> onnx.ModelProto:
    """A graph of one matmul with a constant."""
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    nodes = [op(operator, ["x", "w"], ["y"], **attributes)]
    return model_of(nodes, {"x": ["T", inputs]}, {"y": ["T", "N"]}, {"w": weight}, kind=kind)


def stored(plain: onnx.ModelProto, layer: QuantizedWeight) -> onnx.ModelProto:
    """The graph with quantized weights."""
    _, quantized = changed(plain, lambda model: store_quantized_weights(model, Quantization("int4", {"up": layer})))
    assert TensorProto.INT4 in [tensor.data_type for tensor in quantized.graph.initializer]
    assert len(quantized.graph.initializer) == 2
    return quantized


def test_a_transposed_weight_is_found() -> None:
    layer = QuantizedWeight(torch.arange(-8, 8, dtype=torch.int8).repeat(4).view(32, 2), torch.tensor([[0.5, 2.0]]), 32)
    plain = matmul_graph("Gemm", layer.dequantized.T.contiguous().numpy(), 32, transB=1)
    x = {"x": np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)}
    (expected,), (got,) = outputs_of(plain, x), outputs_of(stored(plain, layer), x, session_options(1, "int4"))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_weights_that_cannot_be_quantized_are_refused_without_output(tmp_path: Path, capfd: Capture) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    weights = load_file(TINY / "model.safetensors")
    weights["model.layers.2.self_attn.o_proj.weight"][0, 0] = torch.nan
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert run(["export", str(checkpoint), str(tmp_path / "bundle"), "--weights", "int4"]) == INPUT
    assert "o_proj: its weight holds infinities or NaN" in capfd.readouterr().err.splitlines()[-1]
    write_checkpoint(tmp_path / "gpt2", build(family_of("gpt2")))
    assert run(["export", str(tmp_path / "gpt2"), str(tmp_path / "bundle"), "--weights", "float8"]) == USAGE
    assert "has no linear layer that can be quantized" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "bundle").exists()


pytestmark = pytest.mark.torch  # exports the bundle

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
OPTIONS = ExportOptions("scatter", weights="int4", requested_activations="int8")
START, END = 40, 140  # positions that are fed row by row; the visible length grows at 64 and 128

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


@pytest.mark.nightly
@pytest.mark.parametrize("block", [32, 64])
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
