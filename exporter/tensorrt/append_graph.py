"""The graph of a bundle for TensorRT: checked, with a fixed number of KV slots, and with attention that TensorRT has kernels for."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import NodeProto, TensorProto, helper, numpy_helper

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature, Tensor

_MASKED_SCORE = -1e9  # as graphs.attention.MASKED_SCORE for float32: scores are float32 for every graph type
_KNOWN = {"scale", "softcap"}  # attributes of Attention nodes in exported graphs
_NAMES = {dtype.onnx: name for name, dtype in DTYPES.items()}


def append_graph(folder: Path, signature: Signature, capacity: int) -> onnx.ModelProto:
    """The graph of a bundle with KV buffers of `capacity` slots, without its weights; no file is changed."""
    path = folder / MODEL_FILE
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise InputFault(f"{path}: cannot be read ({error}): export it again") from error
    check_graph(model, signature, path)
    fix_capacity(model, capacity)
    return model


def refuse_scatter(folder: Path, signature: Signature) -> None:
    """Raise for a bundle with the scatter lowering: TensorRT can write in place only to consecutive slots."""
    if signature.lowering != "append":
        raise InputFault(
            f"{folder}: has the {signature.lowering} lowering, TensorRT needs append: export it again with --lowering append"
        )


def check_graph(model: onnx.ModelProto, signature: Signature, path: Path) -> None:
    """Raise unless inputs and outputs match the signature, and all weights are in the data file."""
    if (mismatch := contract_mismatch(model.graph, signature)) is not None:
        kind, got, expected = mismatch
        raise InputFault(f"{path}: has the {kind} {got}, the manifest says {expected}: export it again")
    _check_external_data(model.graph, path)


def contract_mismatch(graph: onnx.GraphProto, signature: Signature) -> tuple[str, str, str] | None:
    """The first input or output with another name, type or shape than in the signature: its kind, it, and the expected one."""
    for kind, values, tensors in (
        ("input", graph.input, signature.inputs),
        ("output", graph.output, signature.outputs),
    ):
        for value, tensor in zip_longest(values, tensors):
            got, expected = _described(value), _described(tensor)
            if got != expected:
                return kind, got, expected
    return None


def _check_external_data(graph: onnx.GraphProto, path: Path) -> None:
    """Raise if a weight is stored in a file other than the data file, whose digest the manifest records."""
    constants = (attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t"))
    for tensor in (*graph.initializer, *constants):
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value != DATA_FILE:
                raise InputFault(
                    f"{path}: {tensor.name} is stored in {entry.value!r}, expected {DATA_FILE}: export it again"
                )


def fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    """Replace the dynamic dimension S by a number: TensorRT's KV cache update needs a static size."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "S":
                dimension.dim_value = capacity


def _described(value: onnx.ValueInfoProto | Tensor | None) -> str:
    """An input or output of a graph or of the manifest, as error messages show it."""
    if value is None:
        return "(none)"
    if isinstance(value, Tensor):
        return f"{value.name} {value.dtype} [{', '.join(map(str, value.shape))}]"
    kind = value.type.tensor_type
    shape = [size.dim_value if size.HasField("dim_value") else size.dim_param for size in kind.shape.dim]
    dtype = _NAMES.get(kind.elem_type) or onnx.TensorProto.DataType.Name(kind.elem_type)
    return f"{value.name} {dtype} [{', '.join(map(str, shape))}]"


def softcap_of(node: NodeProto) -> float:
    """The softcap of an Attention node; 0: none."""
    return float(_attributes(node).get("softcap", 0.0))


def attention_nodes(model: onnx.ModelProto) -> list[NodeProto]:
    """The Attention nodes of a graph in layer order."""
    return [node for node in model.graph.node if node.op_type == "Attention"]


def decompose_attention(model: onnx.ModelProto, signature: Signature) -> None:
    """Replace all Attention nodes of a graph by matmuls."""
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        attention = node.op_type == "Attention"
        nodes.extend(_decomposed(node, signature, model.graph.initializer) if attention else (node,))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _decomposed(node: NodeProto, signature: Signature, initializers: Any) -> list[NodeProto]:
    """Grouped-query attention as in graphs.attention: the scores of each KV head's group in one matmul."""
    node_attributes = _attributes(node)
    if len(node.input) != 4 or len(node.output) != 1 or not set(node_attributes) <= _KNOWN:
        raise InputFault(
            f"{node.name}: has {len(node.input)} inputs, {len(node.output)} outputs and the attributes "
            f"{', '.join(sorted(node_attributes)) or 'none'}: expected query, key, value, mask, one output, scale and softcap"
        )
    query, key, value, mask = node.input
    name, made = node.name or node.output[0], list[NodeProto]()
    half = DTYPES[signature.dtype].onnx

    def constant(label: str, content: Any, dtype: Any = np.float32) -> str:
        initializers.append(numpy_helper.from_array(np.array(content, dtype), f"{name}/{label}"))
        return f"{name}/{label}"

    def put(kind: str, label: str, inputs: list[str], **attributes: Any) -> str:
        made.append(helper.make_node(kind, inputs, [f"{name}/{label}"], f"{name}/{label}", **attributes))
        return f"{name}/{label}"

    def as_type(label: str, value: str, kind: int) -> str:
        return put("Cast", label, [value], to=kind)

    scale = as_type("scale", constant("scale_number", node_attributes.get("scale", signature.head_dim**-0.5)), half)
    grouped = constant("grouped", [0, signature.kv_heads, -1, signature.head_dim], np.int64)
    folded = put("Mul", "scaled", [put("Reshape", "folded", [query, grouped]), scale])  # B x Hkv x groups * T x D
    products = put("MatMul", "products", [folded, put("Transpose", "key", [key], perm=[0, 1, 3, 2])])
    scores = as_type("scores", products, TensorProto.FLOAT)  # B x Hkv x groups * T x A
    if softcap := node_attributes.get("softcap", 0.0):
        limit = constant("softcap", softcap)
        scores = put("Mul", "capped", [put("Tanh", "tanh", [put("Div", "share", [scores, limit])]), limit])
    rows = put("Shape", "rows", [query], start=0, end=3)
    by_head = put("Concat", "by_head", [rows, constant("rest", [-1], np.int64)], axis=0)
    apart = put("Reshape", "apart", [scores, by_head])  # B x H x T x A
    seen = put("Where", "seen", [mask, apart, constant("hidden", _MASKED_SCORE)])
    weights = as_type("weights", put("Softmax", "softmax", [seen], axis=-1), half)
    together = put("Reshape", "together", [weights, put("Shape", "shape", [products])])
    summed = put("MatMul", "summed", [together, value])  # B x Hkv x groups * T x D
    made.append(
        helper.make_node("Reshape", [summed, put("Shape", "out", [query])], [node.output[0]], f"{name}/attention")
    )
    return made


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
