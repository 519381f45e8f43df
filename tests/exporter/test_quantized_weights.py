"""Quantized weights: engines dequantize to the weights of PyTorch, and drafts stay exact."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.torch import load_file, save_file

from spaceport.exporter.constant_key import WeightNotFound
from spaceport.exporter.quantized_weights import store_quantized_weights
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import Lowering, Precision, Weights
from spaceport.graphs.weight_quantization import BLOCKS, Quantization, QuantizedWeight, quantize_weight
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, session_options
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.steps import chain_batch
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, USAGE
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.check.quantization import measure_quantization
from support.bfloat16_graph import in_float32
from support.exported import exported_once
from support.families import FAMILIES, build
from support.paths import TINY

SLOTS = 128
INT4: tuple[Lowering, Precision, Weights] = ("scatter", "float32", "int4")
FLOAT8: tuple[Lowering, Precision, Weights] = ("append", "float16", "float8")
BFLOAT16: tuple[Lowering, Precision, Weights] = ("scatter", "bfloat16", "same")
BFLOAT16_INT4: tuple[Lowering, Precision, Weights] = ("append", "bfloat16", "int4")

Capture = pytest.CaptureFixture[str]
Kind = tuple[Lowering, Precision, Weights]


def exported(factory: pytest.TempPathFactory, kind: Kind) -> Path:
    lowering, dtype, weights = kind
    return exported_once(factory, lowering, TINY, dtype, weights)


def graph_of(bundle: Path) -> onnx.GraphProto:
    return onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph


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


def test_engines_dequantize_to_the_weights_of_pytorch(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert difference(exported(tmp_path_factory, INT4)) < 1e-5
    assert difference(exported(tmp_path_factory, FLOAT8)) < 4e-3  # the graph computes in float16


@pytest.mark.nightly
def test_a_bfloat16_graph_run_in_float32_has_the_logits_of_pytorch(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = exported(tmp_path_factory, BFLOAT16)
    # the reference takes its weights from the checkpoint, which is float16: bfloat16 holds fewer bits of them
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(TINY / "model.safetensors").items()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert difference(bundle, checkpoint, in_float32(bundle, tmp_path / "wide")) < 1e-5
    small = exported(tmp_path_factory, BFLOAT16_INT4)  # in bfloat16 each dequantized weight is rounded once more
    assert difference(small, TINY, in_float32(small, tmp_path / "small")) < 2e-2


def test_norms_rotary_embeddings_and_softmax_compute_in_float32(tmp_path_factory: pytest.TempPathFactory) -> None:
    for kind, softmaxes in ((BFLOAT16, 3), (BFLOAT16_INT4, 0)):
        model = onnx.shape_inference.infer_shapes(
            onnx.load(str(exported(tmp_path_factory, kind) / MODEL_FILE), load_external_data=False)
        )
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        nodes = model.graph.node
        assert {types[n.input[0]] for n in nodes if n.op_type in ("Cos", "Sin", "Softmax")} == {TensorProto.FLOAT}
        assert sum(node.op_type == "Softmax" for node in nodes) == softmaxes
        norms = [node for node in nodes if node.op_type == "RMSNormalization"]
        stash = {attribute.i for node in norms for attribute in node.attribute if attribute.name == "stash_type"}
        assert (len(norms), stash) == (7, {TensorProto.FLOAT})


def test_quantized_weights_are_fused_for_onnxruntime_and_used_without_dequantization(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = exported(tmp_path_factory, INT4)
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
    kinds = Counter(node.op_type for node in graph_of(exported(tmp_path_factory, FLOAT8)).node)
    assert (kinds["DequantizeLinear"], kinds["Split"]) == (7 * 3, 0)  # TensorRT fuses matmuls by itself


def test_quantized_weights_take_few_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    others, quantized = 301_728 - 239_616, 239_616
    for kind, most in (
        (INT4, 4 * others + quantized * (0.5 + 4 / 16) - 640 * 96 * (4 - 1 - 0.5 - 4 / 16)),  # and the embeddings
        (FLOAT8, 2 * others + quantized * 1.02),
        (BFLOAT16_INT4, 2 * others + quantized * (0.5 + 2 / 32)),
    ):
        manifest = open_bundle(exported(tmp_path_factory, kind)).manifest
        assert manifest.weights == kind[2]
        assert manifest.parameters == 301_728
        assert manifest.files[f"{MODEL_FILE}.data"].size < 1.05 * most


@pytest.mark.parametrize("kind", [INT4, FLOAT8, BFLOAT16_INT4])
def test_drafts_do_not_change_the_output_with_quantized_weights(
    kind: Kind, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = exported(tmp_path_factory, kind)
    bundle = open_bundle(in_float32(folder, tmp_path / "wide") if kind[1] == "bfloat16" else folder)
    session = session_of(str(bundle.path / MODEL_FILE), kind[2])
    with Runtime(bundle, OnnxRuntimeEngine(session, bundle.manifest.signature, 320, 1), 256) as runtime:
        require_equal_output_with_drafts(runtime)


def require_equal_output_with_drafts(runtime: Runtime) -> None:
    prompts = ["def scan(text):", *json.loads((TINY / "prompts.json").read_text("utf-8")).values()]
    for draft_config in (
        Decoding(mask_slots=5, max_tokens=64),
        Decoding(mask_slots=2, draft="chain", max_tokens=64),
    ):
        saved = 0
        for prompt in prompts:
            plain = runtime.generate(prompt, Decoding(mask_slots=0, max_tokens=64))
            drafted = runtime.generate(prompt, draft_config)
            assert drafted.tokens == plain.tokens
            saved += plain.statistics.steps - drafted.statistics.steps
        assert saved > 64  # steps: otherwise no draft token was accepted


@pytest.mark.parametrize("inputs", [96, 192])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_int4_blocks_of_scatter_give_bit_identical_rows_in_every_call(inputs: int, dtype: type) -> None:
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(160, inputs, generator=dice).to(torch.float16 if dtype is np.float16 else torch.float32)
    layer = quantize_weight(weight, "int4", BLOCKS["scatter"])
    assert layer is not None
    small = stored(matmul_graph("MatMul", layer.dequantized.numpy(), inputs), layer)
    session = ort.InferenceSession(small.SerializeToString(), providers=["CPUExecutionProvider"])
    x: NDArray[Any] = np.random.default_rng(1).standard_normal((9, inputs)).astype(dtype)
    (together,) = session.run(None, {"x": x})
    for row in range(9):
        assert together[row].tobytes() == session.run(None, {"x": x[row : row + 1]})[0].tobytes()


def test_float8_is_more_accurate_than_int4(tmp_path_factory: pytest.TempPathFactory) -> None:
    int4 = measure_quantization(open_bundle(exported(tmp_path_factory, INT4)), TINY)
    float8 = measure_quantization(open_bundle(exported(tmp_path_factory, FLOAT8)), TINY)
    assert int4 is not None
    assert float8 is not None
    assert int4.rows == float8.rows == 256
    assert 0 < float8.divergence < int4.divergence / 4
    assert int4.agreeing < float8.agreeing < 256
    assert measure_quantization(open_bundle(exported(tmp_path_factory, BFLOAT16)), TINY) is None


@pytest.mark.parametrize(("kind", "target"), [(FLOAT8, "sm89"), (BFLOAT16_INT4, "sm80")])
def test_tensorrt_rtx_builds_an_engine_of_each_precision(
    kind: Kind, target: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bundle = shutil.copytree(exported(tmp_path_factory, kind), tmp_path / "bundle")
    assert run(["build", str(bundle), "--backend", "tensorrt-rtx", "--target", target, "--max-seq-len", "256"]) == 0
    assert [record.target for record in open_bundle(bundle).manifest.engines.values()] == [target]


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (FLOAT8, "sm80", "--target is sm80: float8 needs sm89 or newer; .* exported without --weights float8"),
        (
            BFLOAT16_INT4,
            "sm75",
            "--target is sm75: bfloat16 needs sm80 or newer; .* exported without --dtype bfloat16",
        ),
    ],
)
def test_a_target_without_the_weights_type_is_refused_before_the_build(
    kind: Kind, target: str, message: str, tmp_path_factory: pytest.TempPathFactory, capfd: Capture
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")
    bundle = exported(tmp_path_factory, kind)
    assert run(["build", str(bundle), "--backend", "tensorrt-rtx", "--target", f"sm89,{target}"]) == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not open_bundle(bundle).manifest.engines


def test_an_error_for_a_weight_missing_from_the_graph_names_its_layer() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}), ir_version=11)
    layer = QuantizedWeight(torch.ones(32, 2, dtype=torch.int8), torch.ones(1, 2), 32)
    with pytest.raises(WeightNotFound, match=r"no matmul with the unchanged weight of model\.up"):
        store_quantized_weights(model, Quantization("int4", {"model.up": layer}))


def matmul_graph(operator: str, weight: NDArray[Any], inputs: int, **attributes: Any) -> onnx.ModelProto:
    """A graph of one matmul with a constant."""
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    node = helper.make_node(operator, ["x", "w"], ["y"], **attributes)
    x, y = (helper.make_tensor_value_info(*entry) for entry in (("x", kind, ["T", inputs]), ("y", kind, ["T", "N"])))
    graph = helper.make_graph([node], "g", [x], [y], [onnx.numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def stored(plain: onnx.ModelProto, layer: QuantizedWeight) -> onnx.ModelProto:
    """The graph with quantized weights."""
    model = ir.from_proto(plain)
    store_quantized_weights(model, Quantization("int4", {"up": layer}))
    quantized = ir.to_proto(model)
    onnx.checker.check_model(quantized, full_check=True)
    assert TensorProto.INT4 in [tensor.data_type for tensor in quantized.graph.initializer]
    assert len(quantized.graph.initializer) == 2
    return quantized


def test_a_transposed_weight_is_found() -> None:
    layer = QuantizedWeight(torch.arange(-8, 8, dtype=torch.int8).repeat(4).view(32, 2), torch.tensor([[0.5, 2.0]]), 32)
    plain = matmul_graph("Gemm", layer.dequantized.T.contiguous().numpy(), 32, transB=1)
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    (expected,) = session_of(plain.SerializeToString(), "same").run(None, {"x": x})
    (got,) = session_of(stored(plain, layer).SerializeToString(), "int4").run(None, {"x": x})
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_unknown_weight_format_is_refused(tmp_path: Path, capfd: Capture) -> None:
    assert run(["export", str(TINY), str(tmp_path / "bundle"), "--weights", "int7"]) == USAGE
    assert "'int7' is not one of 'same', 'int8', 'int4', 'float8'" in capfd.readouterr().err


def test_weights_that_cannot_be_quantized_are_refused_without_output(tmp_path: Path, capfd: Capture) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    weights = load_file(TINY / "model.safetensors")
    weights["model.layers.2.self_attn.o_proj.weight"][0, 0] = torch.nan
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert run(["export", str(checkpoint), str(tmp_path / "bundle"), "--weights", "int4"]) == INPUT
    assert "o_proj: its weight holds infinities or NaN" in capfd.readouterr().err.splitlines()[-1]
    (family,) = [family for family in FAMILIES if family.name == "gpt2"]
    model = build(family)
    model.config.vocab_size = 640
    model.resize_token_embeddings(640)
    model.save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "gpt2")
    assert run(["export", str(tmp_path / "gpt2"), str(tmp_path / "bundle"), "--weights", "float8"]) == USAGE
    assert "has no linear layer that can be quantized" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "bundle").exists()
