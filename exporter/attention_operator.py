"""Attention operator: written-out attention of a traced graph as one operator, its groups still folded into rows."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

# The operator computes the scores of one KV head and their softmax while they are in the CPU's cache, but on one thread:
# of fewer KV heads matrix products keep more threads busy.
LEAST_HEADS = 3


def join_attention(model: ir.Model) -> int:
    """Put an Attention operator in the place of Mul, Transpose, MatMul, Add, Softmax and MatMul; how many there are now."""
    joined = 0
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, 3):
            joined += _join(model.graph, node)
    passes.RemoveUnusedNodesPass()(model)  # and the factors that are attributes now
    return joined


def _join(graph: ir.Graph, softmax: ir.Node) -> bool:
    """Whether the attention around a softmax became one operator."""
    added, after = _made(softmax.inputs[0], "Add"), _only_user(softmax)
    if added is None or after is None or after.op_type != "MatMul" or after.inputs[0] is not softmax.outputs[0]:
        return False
    scores, mask = _made(added.inputs[0], "MatMul"), added.inputs[1]
    if scores is None or mask is None:
        return False
    scaled, turned = _made(scores.inputs[0], "Mul"), _made(scores.inputs[1], "Transpose")
    if scaled is None or turned is None or tuple(turned.attributes.get_ints("perm", ())) != (0, 1, 3, 2):
        return False
    factor = None if scaled.inputs[1] is None else scaled.inputs[1].const_value
    sides = [scaled.inputs[0], turned.inputs[0], after.inputs[1], mask]
    if factor is None or factor.size != 1 or any(_rank(side) != 4 for side in sides):
        return False
    attention = ir.node("Attention", sides, {"scale": float(factor.numpy().item())})
    old, new = after.outputs[0], attention.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    graph.insert_before(after, attention)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove([after, softmax, added, scores, scaled, turned], safe=True)
    new.name = name
    return True


def _made(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node of this kind that makes a value for one user alone."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind and _only_user(node) is not None else None


def _only_user(node: ir.Node) -> ir.Node | None:
    value = node.outputs[0]
    return value.consumers()[0] if len(value.uses()) == 1 and not value.is_graph_output() else None


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)
