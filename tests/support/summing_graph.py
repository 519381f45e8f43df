"""Summing graph: a graph with the contract whose logits are sums of visible tokens; CPUs run it in any type."""

from __future__ import annotations

import onnx
from onnx import parser

from spaceport.graphs.contract.signature import Precision, Signature
from support.append_bundle import declared


def summing_graph(dtype: Precision) -> tuple[bytes, Signature]:
    """The graph and its manifest, for calls of one request; its KV cache holds tokens."""
    signature = Signature(1, 1, 1, 1, dtype, "scatter")
    kind = {"float32": 1, "float16": 10, "bfloat16": 16}[dtype]
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]>
        summing ({declared(signature.inputs)}) => ({declared(signature.outputs)})
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] last = {{-1}}> {{
            nought = Mul (slot_ids, zero)
            nought_1 = Unsqueeze (nought, last)
            slots_1 = Unsqueeze (slot_ids, last)
            where_1 = Concat <axis = -1> (nought_1, nought_1, slots_1)
            where = Unsqueeze (where_1, one)
            tokens = Cast <to = {kind}> (input_ids)
            tokens_1 = Unsqueeze (tokens, one)
            rows = Unsqueeze (tokens_1, last)
            "present.0.key" = ScatterND ("past_key_values.0.key", where, rows)
            "present.0.value" = ScatterND ("past_key_values.0.value", where, rows)
            visible = Shape <start = 3> (attention_mask)
            seen = Slice ("present.0.value", zero, visible, two)
            values = Cast <to = 1> (seen)
            sees = Cast <to = 1> (attention_mask)
            sums = MatMul (sees, values)
            sum = Squeeze (sums, one)
            wanted = Squeeze (logit_rows, zero)
            logits = Gather <axis = 1> (sum, wanted)
        }}""")
    onnx.checker.check_model(model)
    return model.SerializeToString(), signature
