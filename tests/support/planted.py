"""Planted: bundles with an error in the graph that a check has to find."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import helper, numpy_helper

from spaceport.graphs.contract.manifest import manifest_of, record_of, with_digest
from support.small_bundle import entries_of


def planted(source: Path, folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A bundle with a changed graph and a manifest that fits it."""
    shutil.copytree(source, folder)
    model = onnx.load(str(folder / "model.onnx"))
    change(model)
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).unlink()
    onnx.save(
        model, str(folder / "model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=1024
    )
    manifest = entries_of((folder / "manifest.json").read_bytes())
    for name in ("model.onnx", "model.onnx.data"):
        with (folder / name).open("rb") as stream:
            record = record_of(stream)
        manifest["files"][name] = {"sha256": record.sha256, "size": record.size}
    manifest_of(manifest)
    (folder / "manifest.json").write_bytes(with_digest(manifest))
    return folder


def node_of(model: onnx.ModelProto, kind: str, number: int = 0) -> onnx.NodeProto:
    node: onnx.NodeProto = [node for node in model.graph.node if node.op_type == kind][number]
    return node


def perturb_one_weight(model: onnx.ModelProto) -> None:
    change_weight(model, next(tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2), 5 * 64 + 7)


def perturb_layer(model: onnx.ModelProto, layer: int) -> None:
    """Change one weight of the last product of a layer."""
    last = maker(model, f"layers.{layer}.output")
    (product,) = (node for name in last.input if (node := maker(model, name)).op_type == "MatMul")
    change_weight(model, product.input[1])


def change_weight(model: onnx.ModelProto, name: str, at: int = 7) -> None:
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    values = numpy_helper.to_array(weight).copy()
    values.flat[at] += 0.5
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


def spoil_functions(model: onnx.ModelProto, kind: str) -> None:
    """Let the functions of standard operators double what the native operators of a kind compute."""
    for function in model.functions:
        if function.name == kind:
            last = next(node for node in function.node if "y" in node.output)
            last.output[list(last.output).index("y")] = "half"
            function.node.append(helper.make_node("Add", ["half", "half"], ["y"]))


def swap_key_and_value(model: onnx.ModelProto, layer: int = 0) -> None:
    key, value = node_of(model, "ScatterND", 2 * layer), node_of(model, "ScatterND", 2 * layer + 1)
    key.input[2], value.input[2] = value.input[2], key.input[2]


def swap_weights(model: onnx.ModelProto, first: str, second: str) -> None:
    """Swap two weights of native operators."""
    other = {first: second, second: first}
    for node in model.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]


def forget_marks(model: onnx.ModelProto) -> None:
    """Remove the names of values from a graph."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"unknown/{name}" if name.startswith("layers.") else name for name in names]


def maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    node: onnx.NodeProto = next(node for node in model.graph.node if name in node.output)
    return node


def read_stale_keys(model: onnx.ModelProto) -> None:
    """Let attention read the KV cache from before the step's rows were written."""
    written = node_of(model, "ScatterND", 0)
    reader = next(node for node in model.graph.node if node.op_type == "Slice" and node.input[0] == written.output[0])
    reader.input[0] = written.input[0]


def ignore_the_mask(model: onnx.ModelProto) -> None:
    where = next(node for node in model.graph.node if node.op_type == "Where" and "attention_mask" in node.input)
    where.input[2] = where.input[1]


def take_positions_for_granted(model: onnx.ModelProto) -> None:
    """Use slots as positions: right for plain decoding, wrong for a tree."""
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "position_ids":
                node.input[index] = "slot_ids"


def misplace_slots(model: onnx.ModelProto, rows: int) -> None:
    """Write KV rows one slot too far in calls of exactly this many rows."""
    for node in model.graph.node:
        node.input[:] = [{"slot_ids": "misplaced"}.get(name, name) for name in node.input]
    numbers = {"one": 1, "wrong_rows": rows}
    constants = [helper.make_tensor(name, onnx.TensorProto.INT64, [], [value]) for name, value in numbers.items()]
    model.graph.initializer.extend(constants)
    misplacing = [
        helper.make_node("Shape", ["input_ids"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["rows"]),
        helper.make_node("Equal", ["rows", "wrong_rows"], ["is_wrong"]),
        helper.make_node("Cast", ["is_wrong"], ["distance"], to=onnx.TensorProto.INT64),
        helper.make_node("Add", ["slot_ids", "distance"], ["misplaced"]),
    ]
    nodes = [*misplacing, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
