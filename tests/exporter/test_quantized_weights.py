"""Quantized weights: engines dequantize to the weights of PyTorch, and drafts stay exact."""

from __future__ import annotations

import json
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
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.graph_passes import WeightNotFound, store_quantized_weights
from spaceport.graphs.contract.formats import FORMATS, Format
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.graphs.quantization import Quantization, QuantizedWeight, quantize_model
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, session_options
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.steps import chain_batch
from spaceport.verify.quantization import measure_quantization
from spaceport.verify.reference import open_reference
from support.exported import bundle_of
from support.paths import TINY
from support.small_graphs import Array, changed, model_of, op, outputs_of

SLOTS = 128
INT4, INT8, FLOAT8 = (FORMATS[f"float16-{weights}"] for weights in ("int4", "int8", "float8"))
BFLOAT16, BFLOAT16_INT4 = FORMATS["bfloat16"], FORMATS["bfloat16-int4"]


def exported(kind: Format) -> Path:
    return bundle_of(TINY, ExportOptions(kind))


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
    signature = replace(manifest.signature, dtype="float32")
    write_manifest(target, replace(manifest, format="float32", signature=signature))
    return target


def widen(tensor: TensorProto) -> None:
    """The same numbers in float32, which represents every bfloat16."""
    if tensor.data_type == TensorProto.BFLOAT16:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def session_of(model: str | bytes, kind: Format, optimized: Path | None = None) -> ort.InferenceSession:
    """A session for a graph with the options of the runtime."""
    options = session_options(1, kind)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def difference(bundle: Path, checkpoint: Path = TINY, runs: Path | None = None) -> float:
    """The largest difference, relative to the largest logit, between a graph and PyTorch in float32 over three calls."""
    opened = open_bundle(bundle)
    reference = open_reference(opened, checkpoint, SLOTS, 1, "float32")
    signature = open_bundle(runs or bundle).manifest.signature
    engine = OnnxRuntimeEngine(
        session_of(str((runs or bundle) / MODEL_FILE), opened.manifest.number_format), signature, SLOTS, 1
    )
    dice, worst = np.random.default_rng(5), 0.0
    for rows, context in ((40, 0), (9, 40), (1, 49)):
        batch = chain_batch(reference, rows, context, dice)
        expected, got = reference.run(batch).copy(), engine.run(batch)
        worst = max(worst, float(np.abs(expected - got).max() / np.abs(expected).max()))
    return worst


def test_engines_dequantize_to_the_weights_of_pytorch() -> None:
    for kind in (INT4, INT8, FLOAT8):
        assert difference(exported(kind)) < 4e-3  # the graphs compute in float16


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
def test_norms_rotary_embeddings_and_softmax_compute_in_float32(kind: Format, softmaxes: int) -> None:
    graph = onnx.shape_inference.infer_shapes(
        onnx.load(str(exported(kind) / MODEL_FILE), load_external_data=False)
    ).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    assert {types[n.input[0]] for n in graph.node if n.op_type in ("Cos", "Sin", "Softmax")} == {TensorProto.FLOAT}
    assert sum(node.op_type == "Softmax" for node in graph.node) == softmaxes
    norms = [node for node in graph.node if node.op_type == "RMSNormalization"]
    stash = {attribute.i for node in norms for attribute in node.attribute if attribute.name == "stash_type"}
    assert (len(norms), stash) == (7, {TensorProto.FLOAT})


def test_quantized_weights_are_stored_with_their_scales_and_used_without_dequantization(tmp_path: Path) -> None:
    bundle = exported(INT4)
    kinds = Counter(node.op_type for node in graph_of(bundle).node)
    assert (kinds["DequantizeLinear"], kinds["Split"]) == (7 * 3, 0)  # TensorRT fuses matmuls by itself
    types = {tensor.name: tensor.data_type for tensor in graph_of(bundle).initializer}
    codes = [types[node.input[0]] for node in graph_of(bundle).node if node.op_type == "DequantizeLinear"]
    assert set(codes) == {TensorProto.INT4}
    session_of(str(bundle / MODEL_FILE), INT4, tmp_path / "optimized.onnx")
    ran = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node)
    assert (ran["MatMulNBits"], ran["DequantizeLinear"]) == (7 * 3, 0)


def test_int4_codes_in_a_graph_are_those_that_were_written() -> None:
    quantization = quantize_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16), "int4")
    assert all(0.01 < error < 0.2 for error in quantization.errors.values())
    graph = onnx.load(exported(BFLOAT16_INT4) / MODEL_FILE).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, layer in quantization.layers.items():
        assert np.array_equal(stored[f"{name}.codes"].astype(np.int8), layer.codes.numpy())


@pytest.mark.parametrize("kind", [INT4, FLOAT8, BFLOAT16_INT4], ids=["int4", "float8", "bfloat16-int4"])
def test_drafts_do_not_change_the_output_with_quantized_weights(kind: Format, tmp_path: Path) -> None:
    folder = exported(kind)
    bundle = open_bundle(in_float32(folder, tmp_path / "wide") if kind.dtype == "bfloat16" else folder)
    session = session_of(str(bundle.path / MODEL_FILE), kind)
    prompts = ["def scan(text):", *json.loads((TINY / "prompts.json").read_text("utf-8")).values()]
    with Runtime(bundle, OnnxRuntimeEngine(session, bundle.manifest.signature, 320, 1), 256) as runtime:
        for drafting in (Decoding(mask_slots=5, max_tokens=64), Decoding(mask_slots=2, draft="chain", max_tokens=64)):
            saved = 0
            for prompt in prompts:
                plain = runtime.generate(prompt, Decoding(mask_slots=0, max_tokens=64))
                drafted = runtime.generate(prompt, drafting)
                assert drafted.tokens == plain.tokens
                saved += plain.statistics.steps - drafted.statistics.steps
            assert saved > 40  # steps: otherwise no draft token was accepted


def test_float8_is_more_accurate_than_int4() -> None:
    int4 = measure_quantization(open_bundle(exported(INT4)), TINY)
    float8 = measure_quantization(open_bundle(exported(FLOAT8)), TINY)
    assert int4 is not None
    assert float8 is not None
    assert int4.rows == float8.rows == 256
    assert 0 < float8.divergence < int4.divergence / 4
    assert int4.agreeing < float8.agreeing < 256
    assert measure_quantization(open_bundle(exported(BFLOAT16)), TINY) is None


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
    (expected,), (got,) = outputs_of(plain, x), outputs_of(stored(plain, layer), x, session_options(1, INT4))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
