"""Small graphs: a few nodes as a model, what a pass makes of them, and what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Sizes = Sequence[int | str]
Shapes = Mapping[str, Sizes]
Array = NDArray[Any]
T = TypeVar("T")

op = helper.make_node


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Shapes,
    outputs: Shapes,
    constants: Mapping[str, Array],
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model of these nodes at opset 23."""

    def values(shapes: Shapes) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]

    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", values(inputs), values(outputs), stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def changed(plain: onnx.ModelProto, apply: Callable[[ir.Model], T], check: bool = True) -> tuple[T, onnx.ModelProto]:
    """What a pass over a model returns, and the valid model that it makes."""
    model = ir.from_proto(plain)
    found = apply(model)
    model.graph.sort()
    proto = ir.to_proto(model)
    if check:
        onnx.checker.check_model(proto, full_check=True)
    return found, proto


def outputs_of(
    model: onnx.ModelProto, arrays: Mapping[str, Array], options: ort.SessionOptions | None = None
) -> list[Array]:
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, dict(arrays))]


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]
