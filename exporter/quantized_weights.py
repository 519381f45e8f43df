"""QuantizedWeight weights: constants of a traced graph stored as small numbers, and unpacked where they are multiplied."""

from __future__ import annotations

from typing import cast

import onnx_ir as ir

from spaceport.exporter.constant_key import WeightNotFound, key_of
from spaceport.exporter.quantized_embedding import store_quantized_embedding
from spaceport.graphs.contract.signature import Weights
from spaceport.graphs.weight_quantization import Quantization, QuantizedWeight


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Put the small numbers and their scales in the place of every constant that holds a rounded weight.

    A constant is known by its content, so that what an engine unpacks is what was traced, to the bit.
    """
    wanted = {key_of(ir.tensor(layer.values)): layer for layer in quantization.layers.values()}
    names = {id(layer): name for name, layer in quantization.layers.items()}
    stored: dict[int, list[ir.Value]] = {}
    for node in list(model.graph):
        weight = weight_of(node)
        constant = None if weight is None else weight.const_value
        if weight is None or constant is None:
            continue
        transposed = None if weight is node.inputs[1] else node.inputs[1]
        flipped = transposed is not None or bool(node.attributes.get_int("transB", 0))
        layer = wanted.get(key_of(ir.tensor(constant.numpy().T.copy(), constant.dtype) if flipped else constant))
        if layer is None:
            continue
        if id(layer) not in stored:
            stored[id(layer)] = _constants(model.graph, names[id(layer)], layer, quantization.weights)
        _unpack(node, stored[id(layer)], layer)
        if transposed is not None and not transposed.uses():
            model.graph.remove(cast(ir.Node, transposed.producer()), safe=True)
        if not weight.uses():
            del model.graph.initializers[str(weight.name)]
    lost = sorted(names[id(layer)] for layer in wanted.values() if id(layer) not in stored)
    if lost:
        raise WeightNotFound(f"the graph has no product with the weight of {', '.join(lost[:3])} as it is")
    if quantization.table is not None:
        store_quantized_embedding(model.graph, quantization.table)


def _constants(graph: ir.Graph, name: str, layer: QuantizedWeight, weights: Weights) -> list[ir.Value]:
    """The small numbers and the scales as constants of a graph; two numbers of int4 share a byte in the file."""
    codes = layer.codes
    small = ir.tensor(codes.numpy(), ir.DataType.INT4) if weights == "int4" else ir.tensor(codes)
    values = []
    for part, tensor, shape in (("codes", small, codes.shape), ("scale", ir.tensor(layer.scale), layer.scale.shape)):
        tensor.name = f"{name}.{part}"
        kind = ir.TensorType(tensor.dtype)
        values.append(ir.Value(name=tensor.name, const_value=tensor, shape=ir.Shape(shape), type=kind))
        graph.register_initializer(values[-1])
    return values


def _unpack(node: ir.Node, constants: list[ir.Value], layer: QuantizedWeight) -> None:
    """Let a product take what DequantizeLinear makes of the constants."""
    blocks = {"axis": 1} if layer.block is None else {"axis": 0, "block_size": layer.block}
    weight = ir.node("DequantizeLinear", constants, blocks)
    weight.outputs[0].type = constants[1].type
    weight.outputs[0].shape = ir.Shape(layer.codes.shape)
    assert node.graph is not None
    node.graph.insert_before(node, weight)
    node.replace_input_with(1, weight.outputs[0])
    if node.op_type == "Gemm":
        node.attributes["transB"] = ir.AttrInt64("transB", 0)


def weight_of(node: ir.Node) -> ir.Value | None:
    """The constant that a product multiplies by, if it is one; that of a tied embedding is transposed first."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight = producer.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None
