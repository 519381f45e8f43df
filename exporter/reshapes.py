"""Reshapes: replace computed target shapes of Reshape nodes by constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from spaceport.exporter.constants import constant


def fix_reshapes(model: ir.Model) -> int:
    """Use a constant target shape in every Reshape that allows it; returns the number of changed nodes.

    In the constant, 0 means the size of the same input axis and -1 the remaining size, so at most one size may be -1.
    """
    fixed = 0
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].const_value is not None:
            continue
        target = _target(node)
        if target is not None:
            name = f"shape_{'_'.join(map(str, target))}".replace("-", "m")
            node.replace_input_with(1, constant(model.graph, name, np.array(target, np.int64)))
            node.attributes.pop("allowzero", None)
            fixed += 1
    passes.RemoveUnusedNodesPass()(model)
    return fixed


def _target(node: ir.Node) -> Sequence[int] | None:
    """The constant target shape of a Reshape; None if the shape information does not determine one."""
    before, after = (value.shape if value is not None else None for value in (node.inputs[0], node.outputs[0]))
    if before is None or after is None:
        return None
    sizes = []
    for axis, size in enumerate(after):
        if isinstance(size, int):
            sizes.append(size)
        elif axis < len(before) and size.value is not None and before[axis] == size:
            sizes.append(0)
        else:
            sizes.append(-1)
    is_determined = all(size != 0 for size in after if isinstance(size, int)) and sizes.count(-1) <= 1
    return sizes if is_determined else None
