"""Selection graph: a small ONNX graph that selects the best tokens of each row on the device that holds the logits."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from spaceport.graphs.contract.signature import BEST_TOKENS, selection_width

_OPSET, _IR_VERSION = 18, 9


def write_selection(file: Path, vocab_size: int) -> None:
    """Write a graph from logits, B x R x V, to the selection of each row, B x R x (2n + 1), in float32.

    A selection has the n highest logits, their token ids, and the log-sum-exp of all logits. It is a separate graph: as
    an output of the model's graph, ONNX Runtime would compute it in every call.
    """
    count = min(BEST_TOKENS, vocab_size)
    constants = [
        helper.make_tensor("count", TensorProto.INT64, [1], [count]),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("last", TensorProto.INT64, [1], [-1]),
    ]
    nodes = [
        helper.make_node("TopK", ["logits", "count"], ["scores", "ids"], axis=-1, largest=1, sorted=1),
        helper.make_node("Cast", ["ids"], ["tokens"], to=TensorProto.FLOAT),  # exact below 2^24
        helper.make_node("Slice", ["scores", "zero", "one", "last"], ["peak"]),
        helper.make_node("Sub", ["logits", "peak"], ["below"]),
        helper.make_node("Exp", ["below"], ["weights"]),
        helper.make_node("ReduceSum", ["weights", "last"], ["sum"], keepdims=1),
        helper.make_node("Log", ["sum"], ["log"]),
        helper.make_node("Add", ["log", "peak"], ["total"]),
        helper.make_node("Concat", ["scores", "tokens", "total"], ["selection"], axis=-1),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "R", vocab_size])
    selection = helper.make_tensor_value_info("selection", TensorProto.FLOAT, ["B", "R", selection_width(vocab_size)])
    graph = helper.make_graph(nodes, "selection", [logits], [selection], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, file)
