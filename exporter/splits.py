"""Splits: move operators from the outputs of a Split to its input, so that they run once instead of once per output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from spaceport.exporter.constants import constant


def hoist_above_splits(model: ir.Model) -> int:
    """Apply a bias, Reshape or Transpose that follows every output of a Split to its input instead.

    Returns the number of moved operators. No value changes."""
    moved = 0
    for node in list(model.graph):
        split: ir.Node | None = node if node.op_type == "Split" else None
        while split is not None:
            split = _hoist(model.graph, split)
            moved += split is not None
    passes.RemoveUnusedNodesPass()(model)  # and the constants that were concatenated
    return moved


def _hoist(graph: ir.Graph, split: ir.Node) -> ir.Node | None:
    """The new Split after the moved operator; None if the outputs of the old Split have different operators."""
    whole, axis, users = split.inputs[0], _axis(split), _users(split)
    if whole is None or whole.shape is None or axis is None or not users:
        return None
    sizes = [user.outputs[0].shape for user in users]
    if any(size is None for size in sizes):
        return None
    kinds = {user.op_type for user in users}
    moved: tuple[ir.Node, int] | None = None
    if kinds == {"Add"} and axis == len(whole.shape) - 1:
        moved = _bias(graph, whole, split, users, axis)
    elif kinds == {"Reshape"} and axis == len(whole.shape) - 1:
        moved = _reshape(graph, whole, users, axis)
    elif kinds == {"Transpose"}:
        moved = _transpose(whole, users, axis)
    return None if moved is None else _replace(graph, split, users, *moved)


def _bias(
    graph: ir.Graph, whole: ir.Value, split: ir.Node, users: Sequence[ir.Node], axis: int
) -> tuple[ir.Node, int] | None:
    """One Add for all outputs, if each output has a bias of its own size."""
    parts = []
    for part, user in zip(split.outputs, users, strict=True):
        other = user.inputs[1] if user.inputs[0] is part else user.inputs[0]
        tensor = None if other is None or not other.is_initializer() else other.const_value
        if tensor is None or part.shape is None or tensor.shape.numpy() != (part.shape[axis],):
            return None
        parts.append(tensor)
    concatenated = ir.tensor(np.concatenate([tensor.numpy() for tensor in parts]), parts[0].dtype)
    name = "_".join([*(str(tensor.name) for tensor in parts), "joined"])
    return ir.node("Add", [whole, constant(graph, name, concatenated)]), axis


def _reshape(graph: ir.Graph, whole: ir.Value, users: Sequence[ir.Node], axis: int) -> tuple[ir.Node, int] | None:
    """One Reshape for all outputs, if each splits its last axis into heads of the same size."""
    heads = set()
    for user in users:
        given = None if user.inputs[1] is None else user.inputs[1].const_value
        sizes = [] if given is None else given.numpy().tolist()
        if len(sizes) != axis + 2 or any(sizes[:axis]) or sizes[-1] < 1 or user.attributes.get_int("allowzero", 0):
            return None
        heads.add(sizes[-1])
    if len(heads) != 1:
        return None
    size = heads.pop()
    target = np.array([*[0] * axis, -1, size], np.int64)
    return ir.node("Reshape", [whole, constant(graph, f"shape_heads_{axis}_{size}", target)]), axis


def _transpose(whole: ir.Value, users: Sequence[ir.Node], axis: int) -> tuple[ir.Node, int] | None:
    """One Transpose for all outputs, if their permutations are equal."""
    orders = {tuple(user.attributes.get_ints("perm", ())) for user in users}
    order = orders.pop()
    if orders or axis not in order:
        return None
    return ir.node("Transpose", [whole], {"perm": order}), order.index(axis)


def _replace(graph: ir.Graph, split: ir.Node, users: Sequence[ir.Node], before: ir.Node, axis: int) -> ir.Node:
    """Replace the old Split and the operators after it by the new operator and a Split; returns the new Split."""
    shapes = [user.outputs[0].shape for user in users]
    sizes = np.array([shape[axis] for shape in shapes if shape is not None], np.int64)
    before.outputs[0].type = users[0].outputs[0].type
    shape = list(shapes[0] or ())
    before.outputs[0].shape = ir.Shape([*shape[:axis], int(sizes.sum()), *shape[axis + 1 :]])
    name = f"sizes_{'_'.join(map(str, sizes))}"
    inputs = [before.outputs[0], constant(graph, name, sizes)]
    after = ir.node("Split", inputs, {"axis": axis}, num_outputs=len(users))
    graph.insert_before(split, [before, after])
    names = [user.outputs[0].name for user in users]
    for user, part in zip(users, after.outputs, strict=True):
        old = user.outputs[0]
        part.type, part.shape = old.type, old.shape
        old.replace_all_uses_with(part)
    graph.remove([*users, split], safe=True)
    for part, value_name in zip(after.outputs, names, strict=True):
        part.name = value_name  # it may be a layer output, which is identified by its name
    return after


def _axis(split: ir.Node) -> int | None:
    """The axis of a Split as a non-negative number; None if the rank is unknown."""
    shape = None if split.inputs[0] is None else split.inputs[0].shape
    axis = split.attributes.get_int("axis", 0)
    return None if shape is None and axis < 0 else axis % len(shape or range(axis + 1))


def _users(split: ir.Node) -> list[ir.Node]:
    """The only user of each output; empty if an output has several users or is a graph output."""
    users = [use.node for part in split.outputs if len(uses := list(part.uses())) == 1 for use in uses]
    one_user_each = len(users) == len(split.outputs) == len(set(map(id, users)))
    has_graph_output = any(user.outputs[0].is_graph_output() for user in users) or any(
        part.is_graph_output() for part in split.outputs
    )
    return users if one_user_each and not has_graph_output else []
