"""Decomposed attention: replace ONNX Attention operators by matmuls where TensorRT has no kernel for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.signature import Signature

_MASKED_SCORE = -1e9  # as graphs.attention.MASKED_SCORE for float32: scores are float32 for every graph type
_KNOWN = {"scale", "softcap"}


class UnexpectedAttention(ValueError):
    """An Attention node with inputs or attributes that exported graphs do not have."""


def softcap_of(node: NodeProto) -> float:
    """The softcap of an Attention node; 0: none."""
    return float(_attributes(node).get("softcap", 0.0))


def attention_nodes(model: onnx.ModelProto) -> list[NodeProto]:
    """The Attention nodes of a graph in layer order."""
    return [node for node in model.graph.node if node.op_type == "Attention"]


def decompose_attention(model: onnx.ModelProto, signature: Signature) -> int:
    """Replace all Attention nodes of a graph by matmuls; returns the number of replaced nodes."""
    nodes, count = [], 0
    for node in model.graph.node:
        if node.op_type == "Attention":
            nodes.extend(_decomposed(node, signature, model.graph.initializer))
            count += 1
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def _decomposed(node: NodeProto, signature: Signature, initializers: Any) -> list[NodeProto]:
    """Grouped-query attention as in graphs.attention: the scores of each KV head's group in one matmul."""
    node_attributes = _attributes(node)
    if len(node.input) != 4 or len(node.output) != 1 or not set(node_attributes) <= _KNOWN:
        raise UnexpectedAttention(
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

    def as_type(label: str, given: str, kind: int) -> str:
        return put("Cast", label, [given], to=kind)

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
