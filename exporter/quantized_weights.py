"""Quantized weights in a traced graph: as codes and scales that the graph dequantizes, or packed for native products.

Weights are identified by their content, so that the weights that an engine computes with are the traced ones to the bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.exporter.graph_passes import Key, constant, key_of, lazy
from spaceport.exporter.native_weights import Matrix, format_of_matrix, rounded
from spaceport.graphs.parts import BLOCK
from spaceport.graphs.quantization import Quantization, linear_modules
from spaceport.graphs.streamed_weights import values_of
from spaceport.kernels.native_library import DOMAIN, VERSION


class WeightNotFound(ValueError):
    """The graph does not use a quantized weight unchanged; the message names its layer."""


def _weight_of(node: ir.Node) -> ir.Value | None:
    """The constant weight of a matmul, also behind a Transpose (tied embeddings); None if it has none."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight = producer.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None


def _matmuls_of(model: ir.Model, weights: Mapping[str, Tensor]) -> list[tuple[ir.Node, str]]:
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


def _four_bits(codes: Tensor) -> ir.TensorProtocol:
    """Int4 codes, which are packed in pairs when they are written."""
    return lazy(lambda: ir.tensor(codes.numpy(), ir.DataType.INT4), ir.DataType.INT4, codes.shape)


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Replace every constant with a dequantized weight by its codes and scales, and DequantizeLinear before each matmul."""
    dequantized = {name: layer.dequantized for name, layer in quantization.layers.items()}
    for node, name in _matmuls_of(model, dequantized):
        layer = quantization.layers[name]
        codes = _four_bits(layer.codes) if quantization.weights == "int4" else ir.tensor(layer.codes)
        stored = [
            constant(model.graph, f"{name}.{part}", tensor)
            for part, tensor in (("codes", codes), ("scale", ir.tensor(layer.scale)))
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


def _native_matrices(model: PreTrainedModel, format_name: str) -> dict[str, Matrix]:
    """The matrices of linear modules in a native format, by name; the output embedding in that of tables."""
    matrices = {
        name: rounded(module.weight, format_of_matrix(name, module.weight, format_name))
        for name, module in linear_modules(model).items()
        if module.in_features % BLOCK == 0
    }
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.in_features % BLOCK == 0:
        name = next(name for name, module in model.named_modules() if module is head)
        matrices[name] = rounded(head.weight, format_name, table=True)
    return matrices


def _packed(matrix: Matrix) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate(list(matrix.packed())))


def store_native_products(model: ir.Model, traced: PreTrainedModel, format_name: str) -> None:
    """Replace the matmuls of the traced model's linear modules by native products."""
    matrices = _native_matrices(traced, format_name)
    weights = {name: values_of(traced.get_submodule(name).weight) for name in matrices}  # type: ignore[arg-type]
    for node, name in _matmuls_of(model, weights):
        matrix, graph = matrices[name], model.graph
        packed = lazy(partial(_packed, matrix), ir.DataType.UINT8, (matrix.bytes,))
        width = constant(graph, f"native.width.{matrix.outputs}", ir.tensor(np.array([matrix.outputs], np.int64)))
        inputs = constant(graph, f"native.inputs.{matrix.inputs}", ir.tensor(np.array([-1, matrix.inputs], np.int64)))
        shape = ir.node("Shape", [node.inputs[0]], {"start": 0, "end": -1})
        flat = ir.node("Reshape", [node.inputs[0], inputs])
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        product = ir.node(
            "NormProduct",
            [flat.outputs[0], None, None, constant(graph, f"{name}.packed", packed), bias],
            {
                "norm": "none",
                "epsilon": 0.0,
                "activation": "none",
                "widths": [matrix.outputs],
                "formats": matrix.format.name,
                "rank": 0,
            },
            domain=DOMAIN,
        )
        whole = ir.node("Concat", [shape.outputs[0], width], {"axis": 0})
        back = ir.node("Reshape", [product.outputs[0], whole.outputs[0]])
        new, old = [shape, flat, product, whole, back], node.outputs[0]
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [old], back.outputs)
    model.opset_imports[DOMAIN] = VERSION
    passes.RemoveUnusedNodesPass()(model)
