"""Constants of a graph: shared by name, identified by content, and computed when they are compared or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from spaceport.graphs.streamed_weights import source_of, transposed_values_of, values_of

Key = tuple[tuple[int, ...], bytes]  # shape and SHA-256 of the content


def key_of(tensor: ir.TensorProtocol) -> Key:
    """The key of a constant: its shape and the digest of its content."""
    content = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return tuple(tensor.shape.numpy()), sha256(content.data).digest()


def constant(graph: ir.Graph, name: str, array: NDArray[np.generic] | ir.TensorProtocol) -> ir.Value:
    """The initializer with this name, created from the array if missing; a name must determine the content."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = array if isinstance(array, ir.TensorProtocol) else ir.tensor(array)
    tensor.name = name
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.register_initializer(value)
    return value


def lazy(
    compute: Callable[[], ir.TensorProtocol], dtype: ir.DataType, shape: Iterable[int], name: str | None = None
) -> ir.LazyTensor:
    """A tensor that is computed for each use and never held in memory."""
    return ir.LazyTensor(compute, dtype, ir.Shape(list(shape)), name=name)


class _Weight(ir.LazyTensor):
    """The values of a streamed parameter."""

    def __init__(self, parameter: Tensor, traced: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: ir.tensor(values_of(parameter)), traced.dtype, ir.Shape(parameter.shape), name=traced.name
        )
        self.parameter = parameter


def read_lazily(model: ir.Model, parameters: Iterable[Tensor]) -> None:
    """Replace the placeholders of streamed parameters among the constants of a traced graph by lazy tensors."""
    streamed = {parameter.data_ptr(): parameter for parameter in parameters if source_of(parameter) is not None}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        raw = getattr(tensor, "raw", None)
        parameter = streamed.get(raw.data_ptr()) if isinstance(raw, Tensor) else None
        if tensor is not None and parameter is not None:
            value.const_value = _Weight(parameter, tensor)


def fold_transpose(node: ir.Node) -> bool | None:
    """Decide for onnxscript whether a node is folded, after folding a Transpose of a lazy constant without its values.

    It is done here, so that the constants of a graph have the order in which onnxscript folds them."""
    constant = node.inputs[0] if node.op_type == "Transpose" else None
    tensor = None if constant is None else constant.const_value
    if constant is None or not isinstance(tensor, ir.LazyTensor):
        return None
    if node.graph is None or len(constant.uses()) != 1:
        return False
    order = tuple(node.attributes.get_ints("perm", ()) or range(len(tensor.shape))[::-1])
    old, shape = node.outputs[0], [tensor.shape.numpy()[axis] for axis in order]
    transposed = lazy(_transposed(tensor, order), tensor.dtype, shape, old.name)
    value = ir.Value(name=old.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=transposed)
    graph = node.graph
    graph.register_initializer(value)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [], [old], [value])
    del graph.initializers[str(constant.name)]
    return False


def _transposed(tensor: ir.TensorProtocol, order: tuple[int, ...]) -> Callable[[], ir.TensorProtocol]:
    if isinstance(tensor, _Weight) and order == (1, 0):
        return lambda: ir.tensor(transposed_values_of(tensor.parameter))
    return lambda: ir.tensor(np.ascontiguousarray(np.transpose(tensor.numpy(), order)), tensor.dtype)
