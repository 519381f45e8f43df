"""Constants: initializers of a graph, shared by name."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray


def constant(graph: ir.Graph, name: str, array: NDArray[Any] | ir.TensorProtocol) -> ir.Value:
    """The initializer with this name, created from the array if missing; a name must determine the content."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = array if isinstance(array, ir.TensorProtocol) else ir.tensor(array)
    tensor.name = name
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.register_initializer(value)
    return value
