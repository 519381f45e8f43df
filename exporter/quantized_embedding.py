"""Quantized embedding: store the input embedding of a traced graph as int8 codes with one scale per token."""

from __future__ import annotations

import onnx_ir as ir

from spaceport.exporter.constant_key import WeightNotFound, key_of
from spaceport.graphs.int8 import QuantizedEmbedding


def store_quantized_embedding(graph: ir.Graph, embedding: QuantizedEmbedding) -> None:
    """Replace the Gather from the dequantized input embedding by Gathers of codes and scales."""
    wanted = key_of(ir.tensor(embedding.dequantized))
    for node in graph:
        weight = node.inputs[0] if node.op_type == "Gather" else None
        if weight is None or weight.const_value is None or key_of(weight.const_value) != wanted:
            continue
        _gather(graph, node, embedding)
        if not weight.uses():
            del graph.initializers[str(weight.name)]
        return
    raise WeightNotFound("the graph does not gather from the unchanged input embedding")


def _gather(graph: ir.Graph, node: ir.Node, embedding: QuantizedEmbedding) -> None:
    name, ids, old = str(node.inputs[0].name if node.inputs[0] else ""), node.inputs[1], node.outputs[0]
    codes = _constant(graph, f"{name}.codes", ir.tensor(embedding.codes))
    scale = _constant(graph, f"{name}.scale", ir.tensor(embedding.scale[:, None].contiguous()))
    rows = ir.node("Gather", [codes, ids], {"axis": 0})
    cast = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
    scales = ir.node("Gather", [scale, ids], {"axis": 0})
    product = ir.node("Mul", [cast.outputs[0], scales.outputs[0]])
    new = [rows, cast, scales, product]
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, [old], product.outputs)


def _constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value
