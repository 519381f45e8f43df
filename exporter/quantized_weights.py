"""Quantized weights in a graph: write them as codes and scales, and read those of a bundle back.

Weights are identified by their content, so that the weights that an engine computes with are the traced ones to the bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import onnx_ir as ir
import onnx_ir.passes.common as passes
from torch import Tensor

from spaceport.exporter.graph_passes import Key, constant, key_of, lazy
from spaceport.graphs.quantization import Quantization

_CODES, _SCALE = "codes", "scale"  # ends of the names of constants, behind the name of a linear module


class WeightNotFound(ValueError):
    """The graph does not use a quantized weight unchanged; the message names its layer."""


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Replace every constant with a dequantized weight by its codes and scales, and DequantizeLinear before each matmul."""
    dequantized = {name: layer.dequantized for name, layer in quantization.layers.items()}
    for node, name in matmuls_of(model, dequantized):
        layer = quantization.layers[name]
        codes = _packed(layer.codes) if quantization.weights == "int4" else ir.tensor(layer.codes)
        stored = [
            constant(model.graph, f"{name}.{part}", tensor)
            for part, tensor in ((_CODES, codes), (_SCALE, ir.tensor(layer.scale)))
        ]
        blocks = {"axis": 1} if layer.block is None else {"axis": 0, "block_size": layer.block}
        weight = ir.node("DequantizeLinear", stored, blocks)
        weight.outputs[0].type = stored[1].type
        weight.outputs[0].shape = ir.Shape(layer.codes.shape)
        model.graph.insert_before(node, weight)
        node.replace_input_with(1, weight.outputs[0])
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
    passes.RemoveUnusedNodesPass()(model)


def matmuls_of(model: ir.Model, weights: Mapping[str, Tensor]) -> list[tuple[ir.Node, str]]:
    """The matmuls with these weights, also transposed, and the names of their linear modules.

    Modules with equal weights, as in models with repeated layers, are matched in their order, which is that of the graph."""
    wanted: dict[Key, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        for key in {key_of(ir.tensor(weight)), key_of(ir.tensor(weight.T.contiguous()))}:
            wanted[key].append(name)
    known: dict[int, list[str]] = {}
    taken: Counter[str] = Counter()
    matmuls: list[tuple[ir.Node, str]] = []
    for node in model.graph:
        weight_constant = _weight_of(node)
        if weight_constant is None or weight_constant.const_value is None:
            continue
        if id(weight_constant) not in known:
            known[id(weight_constant)] = wanted.get(key_of(weight_constant.const_value), [])
        if not (names := known[id(weight_constant)]):
            continue
        index = taken[names[0]] if len(names) > 1 else 0  # one module may be called several times
        if index == len(names):
            raise WeightNotFound(
                f"the graph has more matmuls with the weight of {names[0]} than there are modules with this weight"
            )
        taken[names[0]] += 1
        matmuls.append((node, names[index]))
    if missing := sorted(weights.keys() - {name for _, name in matmuls}):
        raise WeightNotFound(f"the graph has no matmul with the unchanged weight of {', '.join(missing[:3])}")
    return matmuls


def _weight_of(node: ir.Node) -> ir.Value | None:
    """The constant weight of a matmul, also behind a Transpose (tied embeddings); None if it has none."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight = producer.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None


def _packed(codes: Tensor) -> ir.TensorProtocol:
    """Int4 codes, which are packed in pairs when they are written."""
    return lazy(lambda: ir.tensor(codes.numpy(), ir.DataType.INT4), ir.DataType.INT4, codes.shape)
