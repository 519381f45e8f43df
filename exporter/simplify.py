"""Simplify: optimize a traced graph so that it has fewer operators."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions
from onnxscript.rewriter.rules import common as rules

from spaceport.exporter.lazy_constants import fold_transpose

# The default rules of onnxscript that apply to decoders. Others match convolutions and the like; the rule for pairs of
# slices takes time quadratic in the number of nodes: a third of the tracing time of a model with 30 layers.
RULES = (
    rules.mul_by_1_rule,
    rules.add_0_rule,
    rules.sub_0_rule,
    rules.div_by_1_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.transpose_transpose_rule,
    rules.reshape_reshape_rule,
    rules.materialize_reshape_shape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
)
_SHARED = 128 * 128  # elements of a constant up to which it is compared with others: rotations, and all smaller ones
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators
_ROUNDS = 2  # folded constants let more rules match in the next round


def simplify(model: ir.Model) -> None:
    """Fold constants, remove operators without effect, fuse norms and rotary embeddings, and merge equal operators."""
    passes.InlinePass()(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=fold_transpose)
        rewriter.rewrite(model, RULES)
    _merge_equal(model)
    onnx_fusions.fuse(model)
    _merge_equal(model)  # each fused rotary embedding has its own Cos and Sin


def _merge_equal(model: ir.Model) -> None:
    """Merge operators and constants that are equal."""
    passes.RemoveUnusedNodesPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass(_SHARED)(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)


def fuse_skip_norms(model: ir.Model) -> None:
    """Compute each sum that goes into an RMS norm, and the norm, by one operator of ONNX Runtime."""
    for norm in list(model.graph):
        stream = norm.inputs[0] if norm.op_type == "RMSNormalization" else None
        add = None if stream is None else stream.producer()
        if stream is None or add is None or add.op_type != "Add" or not _adds_states(add):
            continue
        epsilon = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
        inputs = [*add.inputs, norm.inputs[1]]
        fused = ir.node("SkipSimplifiedLayerNormalization", inputs, epsilon, num_outputs=4, domain=MICROSOFT)
        model.opset_imports[MICROSOFT] = 1
        old, new = [norm.outputs[0], stream], [fused.outputs[0], fused.outputs[3]]
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm, add], [fused], old, new)


def _adds_states(add: ir.Node) -> bool:
    """Whether both inputs of an addition have the shape of hidden states."""
    shapes = [None if value is None else value.shape for value in add.inputs]
    return shapes[0] is not None and len(shapes[0]) == 3 and shapes[0] == shapes[1]
