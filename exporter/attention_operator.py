"""Attention operator: written-out attention of a traced graph as one operator, its groups still folded into rows.

Slices of the KV buffers are copies. Buffers that are as long as what rows may see are read as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

# The operator computes the scores of one KV head and their softmax while they are in the CPU's cache, but on one thread:
# of fewer KV heads matrix products keep more threads busy.
MIN_KV_HEADS = 3


def fuse_attention(model: ir.Model) -> int:
    """Put an Attention operator in the place of Mul, Transpose, MatMul, Add, Softmax and MatMul; how many there are now."""
    joined = 0
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, 3):
            joined += _join(model.graph, node)
    conditions: dict[int, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type == "Attention":
            _read_whole(model.graph, node, conditions)
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


def _read_whole(graph: ir.Graph, attention: ir.Node, conditions: dict[int, ir.Value]) -> None:
    """Slice the buffers of an attention only if they are longer than what is visible."""
    slices = [_made(value, "Slice") for value in attention.inputs[1:3]]
    key, value = slices
    if key is None or value is None or (visible := key.inputs[2]) is None or value.inputs[2] is not visible:
        return
    if id(visible) not in conditions:
        slots = ir.node("Shape", [key.inputs[0]], {"start": 2, "end": 3})
        equal = ir.node("Equal", [slots.outputs[0], visible])
        whole = ir.node("Squeeze", [equal.outputs[0]])
        graph.insert_before(attention, [slots, equal, whole])
        conditions[id(visible)] = whole.outputs[0]
    branches = {
        "then_branch": _branch(attention, [key.inputs[0], value.inputs[0]], []),
        "else_branch": _branch(attention, *_copies([key, value])),
    }
    either = ir.node("If", [conditions[id(visible)]], branches)
    old, new = attention.outputs[0], either.outputs[0]
    new.type, new.shape, name = old.type, old.shape, old.name
    graph.insert_before(attention, either)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove([attention, key, value], safe=True)
    new.name = name


def _branch(attention: ir.Node, buffers: Sequence[ir.Value | None], before: Sequence[ir.Node]) -> ir.Graph:
    """A graph of an attention over these buffers, behind other nodes."""
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


def _made(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node of this kind that makes a value for one user alone."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind and _only_user(node) is not None else None


def _only_user(node: ir.Node) -> ir.Node | None:
    value = node.outputs[0]
    return value.consumers()[0] if len(value.uses()) == 1 and not value.is_graph_output() else None


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)
