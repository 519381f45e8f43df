"""Attention operator: fuse the attention of a traced graph into ONNX Attention operators.

The query heads of a KV head stay folded into rows. Slices of KV buffers are copies, so the graph reads a buffer
without a Slice if the buffer is as long as the visible length.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

# The operator computes the scores and the softmax of a KV head in the CPU's cache, but on one thread: with fewer KV
# heads, matmuls keep more threads busy.
MIN_KV_HEADS = 3


def fuse_attention(model: ir.Model) -> int:
    """Replace Mul, Transpose, MatMul, Add, Softmax, MatMul by Attention operators; returns their number."""
    fused = 0
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, 3):
            fused += _fuse(model.graph, node)
    conditions: dict[int, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type == "Attention":
            _skip_full_slices(model.graph, node, conditions)
    passes.RemoveUnusedNodesPass()(model)  # and scale factors that became attributes
    return fused


def _fuse(graph: ir.Graph, softmax: ir.Node) -> bool:
    """Fuse the attention around a softmax; returns whether the nodes matched."""
    masked, weighted = _sole_producer(softmax.inputs[0], "Add"), _only_user(softmax)
    if (
        masked is None
        or weighted is None
        or weighted.op_type != "MatMul"
        or weighted.inputs[0] is not softmax.outputs[0]
    ):
        return False
    scores, mask = _sole_producer(masked.inputs[0], "MatMul"), masked.inputs[1]
    if scores is None or mask is None:
        return False
    scaled, transposed = _sole_producer(scores.inputs[0], "Mul"), _sole_producer(scores.inputs[1], "Transpose")
    if scaled is None or transposed is None or tuple(transposed.attributes.get_ints("perm", ())) != (0, 1, 3, 2):
        return False
    factor = None if scaled.inputs[1] is None else scaled.inputs[1].const_value
    operands = [scaled.inputs[0], transposed.inputs[0], weighted.inputs[1], mask]
    if factor is None or factor.size != 1 or any(_rank(side) != 4 for side in operands):
        return False
    attention = ir.node("Attention", operands, {"scale": float(factor.numpy().item())})
    old, new = weighted.outputs[0], attention.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    graph.insert_before(weighted, attention)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove([weighted, softmax, masked, scores, scaled, transposed], safe=True)
    new.name = name
    return True


def _skip_full_slices(graph: ir.Graph, attention: ir.Node, conditions: dict[int, ir.Value]) -> None:
    """Slice the KV buffers of an attention only if they are longer than the visible length (an If node)."""
    slices = [_sole_producer(value, "Slice") for value in attention.inputs[1:3]]
    key, value = slices
    if key is None or value is None or (visible := key.inputs[2]) is None or value.inputs[2] is not visible:
        return
    if id(visible) not in conditions:
        slots = ir.node("Shape", [key.inputs[0]], {"start": 2, "end": 3})
        equal = ir.node("Equal", [slots.outputs[0], visible])
        is_full = ir.node("Squeeze", [equal.outputs[0]])
        graph.insert_before(attention, [slots, equal, is_full])
        conditions[id(visible)] = is_full.outputs[0]
    branches = {
        "then_branch": _branch(attention, [key.inputs[0], value.inputs[0]], []),
        "else_branch": _branch(attention, *_copies([key, value])),
    }
    conditional = ir.node("If", [conditions[id(visible)]], branches)
    old, new = attention.outputs[0], conditional.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    graph.insert_before(attention, conditional)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove([attention, key, value], safe=True)
    new.name = name


def _branch(attention: ir.Node, buffers: Sequence[ir.Value | None], before: Sequence[ir.Node]) -> ir.Graph:
    """A branch of the If node: the attention over these buffers, after the nodes in `before`."""
    inputs = [attention.inputs[0], *buffers, *attention.inputs[3:]]
    node = ir.node("Attention", inputs, dict(attention.attributes))
    node.outputs[0].type, node.outputs[0].shape = attention.outputs[0].type, attention.outputs[0].shape
    name = f"{attention.outputs[0].name}/{'visible' if before else 'whole'}"
    node.outputs[0].name = name
    return ir.Graph([], [node.outputs[0]], nodes=[*before, node], name=name)


def _copies(slices: Sequence[ir.Node]) -> tuple[list[ir.Value], list[ir.Node]]:
    nodes = [ir.node("Slice", node.inputs) for node in slices]
    for node, old in zip(nodes, slices, strict=True):
        node.outputs[0].type, node.outputs[0].shape = old.outputs[0].type, old.outputs[0].shape
        node.outputs[0].name = f"{old.outputs[0].name}/copy"
    return [node.outputs[0] for node in nodes], nodes


def _sole_producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node of this kind that produces a value, if the value has no other use."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind and _only_user(node) is not None else None


def _only_user(node: ir.Node) -> ir.Node | None:
    value = node.outputs[0]
    return value.consumers()[0] if len(value.uses()) == 1 and not value.is_graph_output() else None


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)
