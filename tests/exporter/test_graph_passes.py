"""Graph passes: simpler graphs compute the same, and a bundle has what they make."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from spaceport.exporter.graph_passes import (
    fix_reshapes,
    fuse_projections,
    hoist_above_splits,
    simplify,
)
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
    # of projections, keys and output (separate for query, key and value with append), and of the output embedding
    for bundle, splits, transposed in (
        (tiny_bundle, 6, 3 * 3 + 1),
        (tiny_append_bundle, 0, 4 * 3 + 1),
        (half_bundle, 6, 3 * 3 + 1),
    ):
        graph = onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph
        counts = Counter(node.op_type for node in graph.node)
        assert (counts["Cos"], counts["Sin"], counts["RotaryEmbedding"]) == (1, 1, 6)  # queries and keys of 3 layers
        assert (counts["Split"], counts["Reshape"], counts["Transpose"]) == (splits, 4 * 3, transposed)
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
    count, model = changed(plain, fix_reshapes, check=False)
    assert (count, operators(model)) == ((1, ["Reshape"]) if target else (0, ["Shape", "Reshape"]))
    if target is None:
        return
    assert [numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer] == [target]
    for batch, rows in ((1, 1), (2, 1), (1, 5), (3, 7)):
        values: dict[Any, int] = {"B": batch, "T": rows, "3*T": 3 * rows, "B*T": batch * rows}
        x = normal(0, *(values.get(size, size) for size in before))
        like = np.empty([values.get(size, size) for size in after], np.float32)
        (y,) = outputs_of(model, {"x": x, "like": like})
        np.testing.assert_array_equal(y, x.reshape(like.shape))


@pytest.mark.parametrize(("vocab_size", "reused", "count"), [(1000, False, 1), (6, False, 0), (1000, True, 0)])
def test_matmuls_of_one_input_are_fused_unless_a_weight_is_reused(vocab_size: int, reused: bool, count: int) -> None:
    """x @ a + b, x @ c and y @ d, where c may be used once more, or have the output of the vocabulary."""
    nodes = [
        op("MatMul", ["x", "a"], ["xa"]),
        op("Add", ["xa", "b"], ["first"]),
        op("MatMul", ["x", "c"], ["xc"]),
        op("MatMul", ["xc", "d"], ["second"]),
        *([op("ReduceSum", ["c"], ["third"])] if reused else []),
    ]
    weights = {"a": normal(0, 8, 4), "b": normal(1, 4), "c": normal(2, 8, 6), "d": normal(3, 6, 3)}
    sizes: dict[str, Sizes] = {"first": ["T", 4], "second": ["T", 3], **({"third": [1, 1]} if reused else {})}
    plain = model_of(nodes, {"x": ["T", 8]}, sizes, weights)
    found, model = changed(plain, partial(fuse_projections, vocab_size=vocab_size))
    assert found == count
    if count:
        assert Counter(operators(model)) == {"MatMul": 2, "Split": 1, "Add": 1}
        assert "a" not in {tensor.name for tensor in model.graph.initializer}
        x = {"x": normal(1, 5, 8)}
        for got, expected in zip(outputs_of(model, x), outputs_of(plain, x), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


def projections(heads: tuple[int, ...], orders: tuple[tuple[int, ...], ...], given: bool) -> onnx.ModelProto:
    """A Split into parts with the given numbers of heads; each part gets a bias, a Reshape and a Transpose."""
    size = 4
    nodes = [op("Split", ["x", "sizes"], [f"part{index}" for index in range(len(heads))], axis=-1)]
    constants = {"sizes": np.array([size * count for count in heads]), "shape": np.array([0, 0, -1, size])}
    between: dict[str, Sizes] = {}
    outputs: dict[str, Sizes] = {}
    for index, (count, order) in enumerate(zip(heads, orders, strict=True)):
        name = f"part{index}"
        constants[f"bias{count}"] = normal(0, size * count)
        nodes += [
            op("Add", [name, f"bias{count}"], [f"{name}.sum"]),
            op("Reshape", [f"{name}.sum", "shape"], [f"{name}.heads"]),
            op("Transpose", [f"{name}.heads"], [f"{name}.rows"], perm=order),
            op("Neg", [f"{name}.rows"], [f"{name}.y"]),
        ]
        cut: Sizes = ["B", "T", count, size]
        moved = [cut[axis] for axis in order]
        flat: Sizes = ["B", "T", size * count]
        between |= {name: flat, f"{name}.sum": flat, f"{name}.heads": cut, f"{name}.rows": moved}
        outputs[f"{name}.y"] = moved
    if given:
        outputs["part0.sum"] = between.pop("part0.sum")
    return model_of(nodes, {"x": ["B", "T", size * sum(heads)]}, outputs, constants, between)


SAME = (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("heads", "orders", "given", "moved", "left"),
    [
        ((3, 1, 1), (SAME,) * 3, False, 3, {"Add": 1, "Reshape": 1, "Transpose": 1}),
        ((2, 1), (SAME, (0, 2, 3, 1)), False, 2, {"Add": 1, "Reshape": 1, "Transpose": 2}),
        ((2, 1), (SAME, SAME), True, 0, {"Add": 2, "Reshape": 2, "Transpose": 2}),
    ],
    ids=["all", "different permutations", "a part is an output"],
)
def test_operators_on_every_output_of_a_split_run_once(
    heads: tuple[int, ...], orders: tuple[tuple[int, ...], ...], given: bool, moved: int, left: dict[str, int]
) -> None:
    plain = projections(heads, orders, given)
    count, model = changed(plain, hoist_above_splits)
    assert count == moved
    assert Counter(operators(model)) == {"Split": 1, "Neg": len(heads), **left}
    require_same(model, plain, {"x": normal(1, 2, 5, 4 * sum(heads))})
    if moved == 3:
        (split,) = (one for one in model.graph.node if one.op_type == "Split")
        assert list(split.output) == ["part0.rows", "part1.rows", "part2.rows"]
