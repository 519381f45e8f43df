"""Splits: operators are moved before a Split with bit-identical results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from spaceport.exporter.splits import hoist_above_splits

HEAD = 4
KIND = TensorProto.FLOAT
Arrays = list[NDArray[Any]]


def projections(heads: tuple[int, ...], orders: tuple[tuple[int, ...], ...], given: bool = False) -> onnx.ModelProto:
    """A Split into parts with the given numbers of heads; each part gets a bias, a Reshape and a Transpose."""
    sizes = [HEAD * count for count in heads]
    dice = np.random.default_rng(0)
    arrays = {
        "sizes": np.array(sizes),
        "shape": np.array([0, 0, -1, HEAD]),
        **{f"bias{size}": dice.standard_normal(size).astype(np.float32) for size in sizes},
    }
    names = [f"part{index}" for index in range(len(sizes))]
    nodes = [helper.make_node("Split", ["x", "sizes"], names, axis=-1)]
    shapes: dict[str, list[int | str]] = {}
    for name, size, order in zip(names, sizes, orders, strict=True):
        nodes += [
            helper.make_node("Add", [name, f"bias{size}"], [f"{name}.sum"]),
            helper.make_node("Reshape", [f"{name}.sum", "shape"], [f"{name}.heads"]),
            helper.make_node("Transpose", [f"{name}.heads"], [f"{name}.rows"], perm=order),
            helper.make_node("Neg", [f"{name}.rows"], [f"{name}.y"]),
        ]
        cut: list[int | str] = ["B", "T", size // HEAD, HEAD]
        moved = [cut[axis] for axis in order]
        shapes |= {name: ["B", "T", size], f"{name}.sum": ["B", "T", size], f"{name}.heads": cut}
        shapes |= {f"{name}.rows": moved, f"{name}.y": moved}
    values = {name: helper.make_tensor_value_info(name, KIND, shape) for name, shape in shapes.items()}
    outputs = [values.pop(f"{name}.y") for name in names] + ([values.pop("part0.sum")] if given else [])
    inputs = [helper.make_tensor_value_info("x", KIND, ["B", "T", sum(sizes)])]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants, value_info=list(values.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def results(model: onnx.ModelProto) -> Arrays:
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    width = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    x = np.random.default_rng(1).standard_normal((2, 5, width)).astype(np.float32)
    return [np.asarray(result) for result in session.run(None, {"x": x})]


def hoisted(plain: onnx.ModelProto) -> tuple[int, onnx.ModelProto]:
    model = ir.from_proto(plain)
    moved = hoist_above_splits(model)
    model.graph.sort()
    return moved, ir.to_proto(model)


SAME = (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("plain", "moved", "left"),
    [
        (projections((3, 1, 1), (SAME,) * 3), 3, {"Add": 1, "Reshape": 1, "Transpose": 1}),
        (projections((2, 1), (SAME, (0, 2, 3, 1))), 2, {"Add": 1, "Reshape": 1, "Transpose": 2}),
        (projections((2, 1), (SAME, SAME), given=True), 0, {"Add": 2, "Reshape": 2, "Transpose": 2}),
    ],
    ids=["all", "different permutations", "a part is an output"],
)
def test_operators_on_every_output_of_a_split_run_once(
    plain: onnx.ModelProto, moved: int, left: dict[str, int]
) -> None:
    count, model = hoisted(plain)
    parts = len(plain.graph.node[0].output)
    assert count == moved
    assert Counter(node.op_type for node in model.graph.node) == {"Split": 1, "Neg": parts, **left}
    for got, expected in zip(results(model), results(plain), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_values_after_a_split_keep_their_names() -> None:
    _, model = hoisted(projections((3, 1), (SAME, SAME)))
    assert [name for node in model.graph.node if node.op_type == "Split" for name in node.output] == [
        "part0.rows",
        "part1.rows",
    ]


def test_queries_keys_and_values_are_split_into_heads_once(tiny_bundle: Path, tiny_append_bundle: Path) -> None:
    # of projections, keys and output (separate for query, key and value with append), and of the output embedding
    for bundle, transpositions in ((tiny_bundle, 3 * 3 + 1), (tiny_append_bundle, 4 * 3 + 1)):
        nodes = onnx.load(str(bundle / "model.onnx"), load_external_data=False).graph.node
        counts = Counter(node.op_type for node in nodes)
        assert (counts["Reshape"], counts["Transpose"]) == (4 * 3, transpositions)
