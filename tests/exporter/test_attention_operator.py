"""Attention operator: matmul attention is fused with bit-identical values; other attention is not changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from spaceport.exporter.attention_operator import MIN_KV_HEADS, fuse_attention
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.runtime.session import Runtime
from spaceport.tools.bench import checkpoint
from spaceport.tools.verify.audit.audit import audit
from spaceport.tools.verify.audit.prompts import TokenizedPrompt

Array = NDArray[np.float32]
HEADS, DIM = 3, 16
FORMS = ("plain", "softcap", "scores are read", "scale per head", "softmax over heads", "keys as they are")


def attention(form: str) -> onnx.ModelProto:
    """Attention as matmuls, in one of these forms; in "scores are read" the scores are an output as well."""
    factor = np.full((HEADS, 1, 1) if form == "scale per head" else (), DIM**-0.5, np.float32)
    turned = form != "keys as they are"
    nodes = [
        helper.make_node("Mul", ["query", "factor"], ["scaled"]),
        helper.make_node("Transpose", ["key"], ["turned"], perm=[0, 1, 3, 2] if turned else [0, 1, 2, 3]),
        helper.make_node("MatMul", ["scaled", "turned"], ["scores"]),
        *([helper.make_node("Tanh", ["scores"], ["capped"])] if form == "softcap" else []),
        helper.make_node("Add", ["capped" if form == "softcap" else "scores", "mask"], ["hidden"]),
        helper.make_node("Softmax", ["hidden"], ["shares"], axis=1 if form == "softmax over heads" else -1),
        helper.make_node("MatMul", ["shares", "value"], ["result"]),
    ]
    shapes: dict[str, list[int | str]] = {
        "query": ["B", HEADS, "T", DIM],
        "key": ["B", HEADS, "A", DIM] if turned else ["B", HEADS, DIM, "A"],
        "value": ["B", HEADS, "A", DIM],
        "mask": ["B", 1, "T", "A"],
        "result": ["B", HEADS, "T", DIM],
        "scores": ["B", HEADS, "T", "A"],
    }
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    read = ["result", *(["scores"] if form == "scores are read" else [])]
    given = [values[name] for name in ("query", "key", "value", "mask")]
    constants = [numpy_helper.from_array(factor, "factor")]
    graph = helper.make_graph(nodes, "g", given, [values[name] for name in read], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def joined(form: str) -> tuple[onnx.ModelProto, int]:
    model = ir.from_proto(attention(form))
    count = fuse_attention(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto, count


def inputs(requests: int, rows: int, visible: int) -> dict[str, Array]:
    """Random inputs; the last row sees nothing."""
    random = np.random.default_rng(rows)
    sides = {"query": rows, "key": visible, "value": visible}
    found = {
        name: random.standard_normal((requests, HEADS, size, DIM)).astype(np.float32) for name, size in sides.items()
    }
    hidden = random.random((requests, 1, rows, visible)) < 0.4
    hidden[:, :, -1] = True
    return found | {"mask": np.where(hidden, np.float32(-1e9), np.float32(0))}


def result(model: onnx.ModelProto, arrays: dict[str, Array]) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: Array = session.run(["result"], arrays)[0]
    return found


@pytest.mark.parametrize(("requests", "rows", "visible"), [(1, 1, 64), (1, 9, 64), (3, 4, 320), (1, 128, 640)])
def test_the_operator_gives_bit_identical_values(requests: int, rows: int, visible: int) -> None:
    model, count = joined("plain")
    arrays = inputs(requests, rows, visible)
    assert count == 1
    assert Counter(node.op_type for node in model.graph.node) == {"Attention": 1}
    assert result(model, arrays).tobytes() == result(attention("plain"), arrays).tobytes()


@pytest.mark.parametrize("rows", [2, 9, 36])
@pytest.mark.parametrize("visible", [64, 320])
def test_a_row_is_bit_identical_alone_with_other_rows_and_with_more_slots(rows: int, visible: int) -> None:
    """With two query heads per KV head, since with one a single row would be another kind of matmul."""
    model, _ = joined("plain")
    arrays = inputs(1, 2 * rows, visible)
    together = result(model, arrays)
    longer = {name: np.pad(arrays[name], ((0, 0), (0, 0), (0, 64), (0, 0))) for name in ("key", "value")}
    for row in range(rows - 1):  # the last one sees nothing
        both = [row, rows + row]
        alone = {**arrays, "query": arrays["query"][:, :, both], "mask": arrays["mask"][:, :, both]}
        assert result(model, alone).tobytes() == together[:, :, both].tobytes()
        mask = np.pad(alone["mask"], ((0, 0), (0, 0), (0, 0), (0, 64)), constant_values=-1e9)
        assert result(model, {**alone, **longer, "mask": mask}).tobytes() == together[:, :, both].tobytes()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
def test_other_attention_is_not_fused(form: str) -> None:
    model, count = joined(form)
    assert count == 0
    assert "Attention" not in {node.op_type for node in model.graph.node}


def branches_of(graph: onnx.GraphProto) -> list[onnx.AttributeProto]:
    """The branches of a graph's If nodes, layer by layer, first the one that reads whole buffers."""
    found = []
    for node in graph.node:
        if node.op_type == "If":
            found += sorted(node.attribute, key=lambda branch: branch.name, reverse=True)
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
def test_an_int8_bundle_with_three_kv_heads_uses_the_attention_operator_and_is_lossless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint.SHAPES, "tiny", (48, 64, 2, 6, MIN_KV_HEADS))
    monkeypatch.setattr(checkpoint, "VOCAB", 300)
    checkpoint.make_checkpoint(tmp_path / "checkpoint", "tiny", mask_slots=2)
    export(tmp_path / "checkpoint", tmp_path / "bundle", ExportOptions(weights="int8"))
    graph = onnx.load(tmp_path / "bundle" / MODEL_FILE, load_external_data=False).graph
    kinds = [{node.op_type for node in branch.g.node} for branch in branches_of(graph)]
    assert kinds == 2 * [{"Attention"}, {"Slice", "Attention"}]
    for requests in (1, 2):  # for one request, buffers are as long as the visible length
        with Runtime.open(tmp_path / "bundle", max_seq_len=256, max_requests=requests) as runtime:
            prompts = [TokenizedPrompt(1, tuple(range(3, end))) for end in (70, 20)]
            report = audit(runtime, prompts, 16)
        assert report.summary.startswith("lossless")
