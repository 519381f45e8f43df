"""Simplify: nothing is computed twice, and results stay the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from spaceport.exporter.simplify import simplify


def test_a_bundle_has_one_cosine_and_one_sine(tiny_bundle: Path, tiny_append_bundle: Path) -> None:
    for bundle in (tiny_bundle, tiny_append_bundle):
        nodes = onnx.load(str(bundle / "model.onnx"), load_external_data=False).graph.node
        counts = Counter(node.op_type for node in nodes)
        assert (counts["Cos"], counts["Sin"]) == (1, 1)
        assert counts["RotaryEmbedding"] == 6  # queries and keys of three layers


def test_equal_operators_are_merged_and_those_without_effect_removed() -> None:
    kind, one = TensorProto.FLOAT, numpy_helper.from_array(np.array(1.0, np.float32), "one")
    nodes = [
        helper.make_node("Mul", ["x", "one"], ["same"]),
        helper.make_node("Exp", ["same"], ["first"]),
        helper.make_node("Cast", ["x"], ["cast"], to=kind),
        helper.make_node("Exp", ["cast"], ["second"]),
        helper.make_node("Add", ["first", "second"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, kind, ["T", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [one])
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    model = ir.from_proto(plain)
    simplify(model)
    simplified = ir.to_proto(model)
    assert [node.op_type for node in simplified.graph.node] == ["Exp", "Add"]
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    expected, got = (
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for proto in (plain, simplified)
    )
    np.testing.assert_array_equal(got, expected)
