"""Reshapes: constant target shapes give the same results for every input size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from spaceport.exporter.reshapes import fix_reshapes

Sizes = list[int | str]


def reshape(before: Sizes, after: Sizes) -> onnx.ModelProto:
    """A graph with a Reshape to the shape of another input."""
    kind = TensorProto.FLOAT
    x, like, y = (
        helper.make_tensor_value_info(name, kind, sizes)
        for name, sizes in (("x", before), ("like", after), ("y", after))
    )
    nodes = [
        helper.make_node("Shape", ["like"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["y"], allowzero=1),
    ]
    graph = helper.make_graph(nodes, "g", [x, like], [y], [numpy_helper.from_array(np.zeros(1), "unused")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [
        (["B", "T", 12], ["B", "T", 3, 4], [0, 0, 3, 4]),
        (["B", 6, "T", 4], ["B", 2, "3*T", 4], [0, 2, -1, 4]),
        (["B", 2, "3*T", 4], ["B", 6, "T", 4], [0, 6, -1, 4]),
        (["B", "T", 3, 4], ["B", "T", 12], [0, 0, 12]),
        (["B", "T", 4], ["B*T", 4], [-1, 4]),
    ],
)
def test_a_constant_reshape_target_fits_every_dynamic_size(before: Sizes, after: Sizes, target: list[int]) -> None:
    model = ir.from_proto(reshape(before, after))
    assert fix_reshapes(model) == 1
    fixed = ir.to_proto(model)
    assert [node.op_type for node in fixed.graph.node] == ["Reshape"]
    assert [numpy_helper.to_array(tensor).tolist() for tensor in fixed.graph.initializer] == [target]
    session = ort.InferenceSession(fixed.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, rows in ((1, 1), (2, 1), (1, 5), (3, 7)):
        values = {"B": batch, "T": rows, "3*T": 3 * rows, "B*T": batch * rows}
        x = np.random.default_rng(0).standard_normal([values.get(size, size) for size in before]).astype(np.float32)
        like = np.empty([values.get(size, size) for size in after], np.float32)
        (y,) = session.run(None, {"x": x, "like": like})
        np.testing.assert_array_equal(y, x.reshape(like.shape))


def test_a_reshape_target_with_two_unknown_sizes_is_not_changed() -> None:
    model = ir.from_proto(reshape(["B", "T"], ["U", "V"]))
    assert fix_reshapes(model) == 0
    assert Counter(node.op_type for node in model.graph) == {"Shape": 1, "Reshape": 1}


def test_all_reshape_targets_of_a_scatter_bundle_are_constants(tiny_bundle: Path) -> None:
    graph = onnx.load(str(tiny_bundle / "model.onnx"), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    assert all(node.input[1] in constants for node in graph.node if node.op_type == "Reshape")
