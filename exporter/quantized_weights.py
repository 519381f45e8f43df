"""Quantized weights: store the weights of a graph as codes and scales, with DequantizeLinear before each matmul."""

from __future__ import annotations

from typing import cast

import onnx_ir as ir
from torch import Tensor

from spaceport.exporter.constant_key import WeightNotFound, key_of
from spaceport.exporter.lazy_constants import lazy
from spaceport.exporter.quantized_embedding import store_quantized_embedding
from spaceport.graphs.contract.signature import Weights
from spaceport.graphs.weight_quantization import Quantization, QuantizedWeight


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Replace every constant with a dequantized weight by its codes and scales.

    Constants are identified by their content, so that the dequantized weights in an engine are bit-identical to the
    traced ones.
    """
    wanted = {key_of(ir.tensor(layer.dequantized)): layer for layer in quantization.layers.values()}
    names = {id(layer): name for name, layer in quantization.layers.items()}
    stored: dict[int, list[ir.Value]] = {}
    for node in list(model.graph):
        weight = weight_of(node)
        constant = None if weight is None else weight.const_value
        if weight is None or constant is None:
            continue
        transposed = None if weight is node.inputs[1] else node.inputs[1]
        is_transposed = transposed is not None or bool(node.attributes.get_int("transB", 0))
        layer = wanted.get(key_of(ir.tensor(constant.numpy().T.copy(), constant.dtype) if is_transposed else constant))
        if layer is None:
            continue
        if id(layer) not in stored:
            stored[id(layer)] = _constants(model.graph, names[id(layer)], layer, quantization.weights)
        _dequantize(node, stored[id(layer)], layer)
        if transposed is not None and not transposed.uses():
            model.graph.remove(cast(ir.Node, transposed.producer()), safe=True)
        if not weight.uses():
            del model.graph.initializers[str(weight.name)]
    missing = sorted(names[id(layer)] for layer in wanted.values() if id(layer) not in stored)
    if missing:
        raise WeightNotFound(f"the graph has no matmul with the unchanged weight of {', '.join(missing[:3])}")
    if quantization.embedding is not None:
        store_quantized_embedding(model.graph, quantization.embedding)


def _constants(graph: ir.Graph, name: str, layer: QuantizedWeight, weights: Weights) -> list[ir.Value]:
    """The codes and the scales as constants of a graph; int4 codes are packed in pairs."""
    codes = layer.codes
    packed = _packed(codes) if weights == "int4" else ir.tensor(codes)
    values = []
    for part, tensor, shape in (("codes", packed, codes.shape), ("scale", ir.tensor(layer.scale), layer.scale.shape)):
        tensor.name = f"{name}.{part}"
        kind = ir.TensorType(tensor.dtype)
        values.append(ir.Value(name=tensor.name, const_value=tensor, shape=ir.Shape(shape), type=kind))
        graph.register_initializer(values[-1])
    return values


def _packed(codes: Tensor) -> ir.TensorProtocol:
    return lazy(lambda: ir.tensor(codes.numpy(), ir.DataType.INT4), ir.DataType.INT4, codes.shape)


def _dequantize(node: ir.Node, constants: list[ir.Value], layer: QuantizedWeight) -> None:
    """Use the output of DequantizeLinear as the weight of a matmul."""
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
    """The constant weight of a matmul, also behind a Transpose (tied embeddings); None if it has none."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight = producer.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None
