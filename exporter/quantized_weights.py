"""Quantized weights in a graph: write them as codes and scales, and read those of a bundle back.

Weights are identified by their content, so that the weights that an engine computes with are the traced ones to the bit.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper
from torch import Tensor

from spaceport.exporter.graph_passes import JOINED, Key, constant, key_of, lazy
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import Weights
from spaceport.graphs.quantization import AttentionScales, Quantization, QuantizedWeight

PLACES = "spaceport.int8"  # metadata of a graph: where the codes and scales of each linear module are, as JSON
ATTENTION = "spaceport.int8_attention"  # metadata of a graph: the scales of each layer's attention, as JSON
EMBEDDING = ""  # the name of the input embedding there

# Names of the constants with the codes and the scales of a linear module, its first column in them, and the one behind
# its last.
Place = tuple[str, str, int, int]


class WeightNotFound(ValueError):
    """The graph does not use a quantized weight unchanged; the message names its layer."""


@dataclass(frozen=True)
class QuantizedMatmul:
    """A matmul of a traced graph with a quantized weight."""

    node: ir.Node
    name: str  # of the linear module
    layer: QuantizedWeight


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Replace every constant with a dequantized weight by its codes and scales, and DequantizeLinear before each matmul."""
    for matmul in quantized_matmuls(model, quantization.layers):
        layer, node = matmul.layer, matmul.node
        codes = _packed(layer.codes) if quantization.weights == "int4" else ir.tensor(layer.codes)
        stored = [
            constant(model.graph, f"{matmul.name}.{part}", tensor)
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
    if quantization.embedding is not None:
        store_embedding(model, quantization.embedding)
    passes.RemoveUnusedNodesPass()(model)


def quantized_matmuls(model: ir.Model, layers: Mapping[str, QuantizedWeight]) -> list[QuantizedMatmul]:
    """The matmuls with quantized weights.

    Modules with equal weights, as in models with repeated layers, are matched in their order, which is that of the graph."""
    wanted: dict[Key, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        weight = layer.dequantized
        for key in {key_of(ir.tensor(weight)), key_of(ir.tensor(weight.T.contiguous()))}:
            wanted[key].append(name)
    known: dict[int, list[str]] = {}
    taken: Counter[str] = Counter()
    matmuls: list[QuantizedMatmul] = []
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
        matmuls.append(QuantizedMatmul(node, names[index], layers[names[index]]))
    if missing := sorted(layers.keys() - {matmul.name for matmul in matmuls}):
        raise WeightNotFound(f"the graph has no matmul with the unchanged weight of {', '.join(missing[:3])}")
    return matmuls


def store_embedding(model: ir.Model, embedding: QuantizedWeight) -> tuple[ir.Value, ir.Value]:
    """Replace the Gather from the dequantized input embedding by Gathers of its codes and scales, which are returned."""
    wanted = key_of(ir.tensor(embedding.dequantized.T))
    for node in model.graph:
        weight = node.inputs[0] if node.op_type == "Gather" else None
        if weight is None or weight.const_value is None or key_of(weight.const_value) != wanted:
            continue
        codes = constant(model.graph, "embedding.codes", ir.tensor(embedding.codes.T))
        scale = constant(model.graph, "embedding.scale", ir.tensor(embedding.scale[:, None].contiguous()))
        rows, scales = (ir.node("Gather", [table, node.inputs[1]], {"axis": 0}) for table in (codes, scale))
        cast = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
        product = ir.node("Mul", [cast.outputs[0], scales.outputs[0]])
        new, old = [rows, cast, scales, product], node.outputs[0]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], new, [old], product.outputs)
        return codes, scale
    raise WeightNotFound("the graph does not gather from the unchanged input embedding")


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


def stored_weights(graph: bytes, folder: Path, weights: Weights, limbs: int) -> Quantization:
    """The weights in the graph of a bundle that were rounded by GPTQ: int8 layers with these limbs, or int4 layers."""
    read = partial(_stored_int8, limbs=limbs) if limbs else _stored_int4
    try:
        model = onnx.load_model_from_string(graph)
        return read(model, {entry.key: entry.value for entry in model.metadata_props}, folder)
    except (DecodeError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputFault(
            f"{folder}: {type(error).__name__} {error} where the graph describes its {weights} weights: expected one of this "
            f"version of `spaceport export --weights {weights}`; export the checkpoint again"
        ) from error


def _stored_int8(model: onnx.ModelProto, metadata: Mapping[str, str], folder: Path, limbs: int) -> Quantization:
    """The int8 layers and the int8 embedding; large constants are mapped from the files in the folder."""
    places: dict[str, Place] = json.loads(metadata[PLACES])
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    mapped = cache(lambda name: _mapped(constants[name], folder))
    table_codes, table_scales, _, _ = places.pop(EMBEDDING)
    layers = {
        name: QuantizedWeight(mapped(codes)[:, start:end], mapped(scales)[start:end])
        for name, (codes, scales, start, end) in places.items()
    }
    attention = tuple(
        AttentionScales(**{name: torch.tensor(values) for name, values in scales.items()})
        for scales in json.loads(metadata[ATTENTION])
    )
    embedding = QuantizedWeight(mapped(table_codes).T, mapped(table_scales)[:, 0])
    return Quantization("int8", layers, limbs, embedding, attention=attention)


def _stored_int4(model: onnx.ModelProto, metadata: Mapping[str, str], folder: Path) -> Quantization:
    """The int4 layers, by the names of their constants before matmuls were joined."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    joined = json.loads(metadata.get(JOINED, "{}"))
    own = [name for name, tensor in constants.items() if tensor.data_type == onnx.TensorProto.INT4]
    read = cache(lambda name: _array(constants[name], folder))
    layers = {}
    for name in (*joined, *own):
        module, _, part = name.rpartition(".")
        if part != "codes":
            continue
        places = (joined.get(stored, (stored, None, None)) for stored in (name, f"{module}.scale"))
        codes, scale = (read(stored)[:, start:end].contiguous() for stored, start, end in places)
        if constants[joined.get(name, (name,))[0]].data_type == onnx.TensorProto.INT4:
            layers[module] = QuantizedWeight(codes, scale, len(codes) // len(scale))
    return Quantization("int4", layers)


def _array(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    """A constant, in a type that torch has."""
    if onnx.external_data_helper.uses_external_data(tensor):
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == onnx.TensorProto.BFLOAT16:  # a type of its own in numpy
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.astype(np.int8) if tensor.data_type == onnx.TensorProto.INT4 else array.copy())


def _mapped(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    """A constant whose values are read from its file when they are used."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place:
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    dtype, offset = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), int(place.get("offset", 0))
    return torch.from_numpy(np.memmap(folder / place["location"], dtype, "c", offset, tuple(tensor.dims)))
