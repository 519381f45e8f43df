"""Graph passes: simpler graphs compute the same, and a bundle has what they make."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from spaceport.exporter.graph_passes import fix_reshapes, simplify
from spaceport.graphs.contract.manifest import MODEL_FILE
from support.small_graphs import Array, Sizes, changed, model_of, op, operators, outputs_of


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def require_same(model: onnx.ModelProto, plain: onnx.ModelProto, arrays: dict[str, Array]) -> None:
    for got, expected in zip(outputs_of(model, arrays), outputs_of(plain, arrays), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_bundle_has_the_graph_that_the_passes_make(
    tiny_bundle: Path, tiny_append_bundle: Path, half_bundle: Path
) -> None:
    # for each layer, and of the output embedding
    for bundle, reshaped, transposed in (
        (tiny_bundle, 6 * 3, 5 * 3 + 1),
        (tiny_append_bundle, 4 * 3, 4 * 3 + 1),
        (half_bundle, 6 * 3, 5 * 3 + 1),
    ):
        graph = onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph
        counts = Counter(node.op_type for node in graph.node)
        assert (counts["Cos"], counts["Sin"], counts["RotaryEmbedding"]) == (1, 1, 6)  # queries and keys of 3 layers
        assert (counts["Reshape"], counts["Transpose"]) == (reshaped, transposed)
        constants = {tensor.name for tensor in graph.initializer}
        targets = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
        assert targets <= constants or bundle == tiny_append_bundle
        shapes = [tuple(tensor.dims) for tensor in graph.initializer]
        assert sum(shape in ((640, 96), (96, 640)) for shape in shapes) == 1  # tied weights
        text = (bundle / MODEL_FILE).read_bytes()
        assert str(Path.home()).encode() not in text  # no paths of the exporting machine
        assert b".py" not in text


def test_equal_operators_are_merged_and_those_without_effect_removed() -> None:
    nodes = [
        op("Mul", ["x", "one"], ["same"]),
        op("Exp", ["same"], ["first"]),
        op("Cast", ["x"], ["cast"], to=TensorProto.FLOAT),
        op("Exp", ["cast"], ["second"]),
        op("Add", ["first", "second"], ["y"]),
    ]
    plain = model_of(nodes, {"x": ["T", 8]}, {"y": ["T", 8]}, {"one": np.array(1.0, np.float32)})
    _, model = changed(plain, simplify)
    assert operators(model) == ["Exp", "Add"]
    require_same(model, plain, {"x": normal(0, 3, 8)})


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [
        (["B", "T", 12], ["B", "T", 3, 4], [0, 0, 3, 4]),
        (["B", 6, "T", 4], ["B", 2, "3*T", 4], [0, 2, -1, 4]),
        (["B", 2, "3*T", 4], ["B", 6, "T", 4], [0, 6, -1, 4]),
        (["B", "T", 3, 4], ["B", "T", 12], [0, 0, 12]),
        (["B", "T", 4], ["B*T", 4], [-1, 4]),
        (["B", "T"], ["U", "V"], None),  # two unknown sizes
    ],
)
def test_a_constant_reshape_target_fits_every_size(before: Sizes, after: Sizes, target: list[int] | None) -> None:
    nodes = [op("Shape", ["like"], ["shape"]), op("Reshape", ["x", "shape"], ["y"], allowzero=1)]
    plain = model_of(nodes, {"x": before, "like": after}, {"y": after}, {"unused": np.zeros(1)})
    _, model = changed(plain, fix_reshapes, check=False)
    assert operators(model) == (["Reshape"] if target else ["Shape", "Reshape"])
    if target is None:
        return
    assert [numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer] == [target]
    for batch, rows in ((1, 1), (2, 1), (1, 5), (3, 7)):
        values: dict[Any, int] = {"B": batch, "T": rows, "3*T": 3 * rows, "B*T": batch * rows}
        x = normal(0, *(values.get(size, size) for size in before))
        like = np.empty([values.get(size, size) for size in after], np.float32)
        (y,) = outputs_of(model, {"x": x, "like": like})
        np.testing.assert_array_equal(y, x.reshape(like.shape))
