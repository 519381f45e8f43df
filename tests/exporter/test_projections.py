"""Projections: fused matmuls give the same results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from spaceport.exporter.projections import fuse_projections


def graph(tied: bool) -> onnx.ModelProto:
    """x @ a + b, x @ c and y @ d, where c may be used once more."""
    random = np.random.default_rng(0)
    shapes = {"a": (8, 4), "b": (4,), "c": (8, 6), "d": (6, 3)}
    weights = [onnx.numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["xa"]),
        helper.make_node("Add", ["xa", "b"], ["first"]),
        helper.make_node("MatMul", ["x", "c"], ["xc"]),
        helper.make_node("MatMul", ["xc", "d"], ["second"]),
        *([helper.make_node("ReduceSum", ["c"], ["third"])] if tied else []),
    ]
    kind = TensorProto.FLOAT
    sizes = {"first": ["T", 4], "second": ["T", 3], **({"third": [1, 1]} if tied else {})}
    outputs = [helper.make_tensor_value_info(name, kind, size) for name, size in sizes.items()]
    made = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", kind, ["T", 8])], outputs, weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def outputs(model: onnx.ModelProto) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)})


def test_matmuls_of_one_input_are_fused_with_the_same_results() -> None:
    plain = graph(tied=False)
    model = ir.from_proto(plain)
    assert fuse_projections(model, vocab_size=1000) == 1
    fused = ir.to_proto(model)
    onnx.checker.check_model(fused, full_check=True)
    assert Counter(node.op_type for node in fused.graph.node) == {"MatMul": 2, "Split": 1, "Add": 1}
    assert "a" not in {tensor.name for tensor in fused.graph.initializer}
    for got, expected in zip(outputs(fused), outputs(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_weight_with_another_use_is_not_fused() -> None:
    model = ir.from_proto(graph(tied=True))
    assert fuse_projections(model, vocab_size=1000) == 0


def test_a_matmul_with_as_many_outputs_as_the_vocabulary_is_not_fused() -> None:
    model = ir.from_proto(graph(tied=False))
    assert fuse_projections(model, vocab_size=6) == 0


def test_a_scatter_bundle_has_two_fused_matmuls_per_layer(tiny_bundle: Path, tiny_append_bundle: Path) -> None:
    for bundle, splits in ((tiny_bundle, 6), (tiny_append_bundle, 0)):
        nodes = onnx.load(str(bundle / "model.onnx"), load_external_data=False).graph.node
        assert sum(node.op_type == "Split" for node in nodes) == splits
