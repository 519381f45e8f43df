"""Summing graph: a graph with the contract whose logits are sums of visible tokens; CPUs run it in any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from spaceport.graphs.contract.signature import Precision, Signature

_TYPES = {"float32": T.FLOAT, "float16": T.FLOAT16, "bfloat16": T.BFLOAT16, "int64": T.INT64, "bool": T.BOOL}


def summing_graph(dtype: Precision) -> tuple[bytes, Signature]:
    """The graph and its manifest, for calls of one request; its KV cache holds tokens."""
    signature = Signature(1, 1, 1, 1, dtype, "scatter")
    nodes = [
        node("Mul", ["slot_ids", "zero"], "nought"),
        *(node("Unsqueeze", [name, "last"], f"{name}_1") for name in ("nought", "slot_ids")),
        node("Concat", ["nought_1", "nought_1", "slot_ids_1"], "where_1", axis=-1),  # 1 x T x 3
        node("Unsqueeze", ["where_1", "one"], "where"),  # 1 x 1 x T x 3
        node("Cast", ["input_ids"], "tokens", to=_TYPES[dtype]),
        node("Unsqueeze", ["tokens", "one"], "tokens_1"),
        node("Unsqueeze", ["tokens_1", "last"], "rows"),
        *(
            node("ScatterND", [f"past_key_values.0.{kind}", "where", "rows"], f"present.0.{kind}")
            for kind in ("key", "value")
        ),
        node("Shape", ["attention_mask"], "visible", start=3),
        node("Slice", ["present.0.value", "nil", "visible", "two"], "seen"),
        node("Cast", ["seen"], "values", to=T.FLOAT),
        node("Cast", ["attention_mask"], "sees", to=T.FLOAT),
        node("MatMul", ["sees", "values"], "sums"),  # 1 x 1 x T x 1
        node("Squeeze", ["sums", "one"], "sum"),
        node("Squeeze", ["logit_rows", "nil"], "wanted"),
        node("Gather", ["sum", "wanted"], "logits", axis=1),
    ]
    constants = {"zero": [0], "nil": [0], "one": [1], "two": [2], "last": [-1]}
    graph = helper.make_graph(
        nodes,
        "summing",
        [value(tensor.name, tensor.dtype, tensor.shape) for tensor in signature.inputs],
        [value(tensor.name, tensor.dtype, tensor.shape) for tensor in signature.outputs],
        [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString(), signature


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], **attributes)


def value(name: str, dtype: str, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _TYPES[dtype], shape)
