"""Rewrite a traced graph so that it computes the same with fewer operators.

Constants are shared by name, identified by content, and computed when they are compared or written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import RewriteRuleSet, onnx_fusions
from onnxscript.rewriter.rules import common as rules
from onnxscript.rewriter.rules.fusion import _rotary_embedding as rotary
from torch import Tensor

from spaceport.graphs.streamed_weights import source_of, transposed_values_of, values_of

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
_SHARED = 128 * 128  # elements of a constant up to which it is compared with others
_ROUNDS = 2  # folded constants let more rules match in the next round

# Properties that fused matmuls share: their input, and whether they belong to an adapter.
FusionKey = tuple[ir.Value, bool]
# Shape of a constant, and SHA-256 of its content.
Key = tuple[tuple[int, ...], bytes]


def key_of(tensor: ir.TensorProtocol) -> Key:
    """The key of a constant: its shape and the digest of its content."""
    content = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return tuple(tensor.shape.numpy()), sha256(content.data).digest()


def constant(graph: ir.Graph, name: str, array: NDArray[np.generic] | ir.TensorProtocol) -> ir.Value:
    """The initializer with this name, created from the array if missing; a name must determine the content."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = array if isinstance(array, ir.TensorProtocol) else ir.tensor(array)
    tensor.name = name
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.register_initializer(value)
    return value


def lazy(
    compute: Callable[[], ir.TensorProtocol], dtype: ir.DataType, shape: Iterable[int], name: str | None = None
) -> ir.LazyTensor:
    """A tensor that is computed for each use and never held in memory."""
    return ir.LazyTensor(compute, dtype, ir.Shape(list(shape)), name=name)


class _Weight(ir.LazyTensor):
    """The values of a streamed parameter."""

    def __init__(self, parameter: Tensor, traced: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: ir.tensor(values_of(parameter)), traced.dtype, ir.Shape(parameter.shape), name=traced.name
        )
        self.parameter = parameter


def read_lazily(model: ir.Model, parameters: Iterable[Tensor]) -> None:
    """Replace the placeholders of streamed parameters among the constants of a traced graph by lazy tensors."""
    streamed = {parameter.data_ptr(): parameter for parameter in parameters if source_of(parameter) is not None}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        raw = getattr(tensor, "raw", None)
        parameter = streamed.get(raw.data_ptr()) if isinstance(raw, Tensor) else None
        if tensor is not None and parameter is not None:
            value.const_value = _Weight(parameter, tensor)


def fold_transpose(node: ir.Node) -> bool | None:
    """Decide for onnxscript whether a node is folded, after folding a Transpose of a lazy constant without its values.

    It is done here, so that the constants of a graph have the order in which onnxscript folds them."""
    constant = node.inputs[0] if node.op_type == "Transpose" else None
    tensor = None if constant is None else constant.const_value
    if constant is None or not isinstance(tensor, ir.LazyTensor):
        return None
    if node.graph is None or len(constant.uses()) != 1:
        return False
    order = tuple(node.attributes.get_ints("perm", ()) or range(len(tensor.shape))[::-1])
    old, shape = node.outputs[0], [tensor.shape.numpy()[axis] for axis in order]
    transposed = lazy(_transposed(tensor, order), tensor.dtype, shape, old.name)
    value = ir.Value(name=old.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=transposed)
    graph = node.graph
    graph.register_initializer(value)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [], [old], [value])
    del graph.initializers[str(constant.name)]
    return False


def _transposed(tensor: ir.TensorProtocol, order: tuple[int, ...]) -> Callable[[], ir.TensorProtocol]:
    if isinstance(tensor, _Weight) and order == (1, 0):
        return lambda: ir.tensor(transposed_values_of(tensor.parameter))
    return lambda: ir.tensor(np.ascontiguousarray(np.transpose(tensor.numpy(), order)), tensor.dtype)


class _HalfRotaryEmbedding(rotary.RotaryEmbedding23Fusion):
    """The rotary embedding of models in float16 and bfloat16, which compute its angles in float32.

    onnxscript fuses those of float32 models. On a GPU it is one kernel instead of seven: a step of a 7B has 593 launches
    instead of 978, counted in its captured graph.
    """

    def pattern(  # type: ignore[override]  # the names of arguments are those of the pattern's values
        self,
        op: Any,
        x: Any,
        freqs: Any,
        start1: Any,
        end1: Any,
        start2: Any,
        end2: Any,
        one1: Any,
        one2: Any,
        dtype: Any,
    ) -> Any:
        angles = op.Concat(freqs, freqs, axis=-1)
        cos = op.Unsqueeze(op.Cast(op.Cos(angles), to=dtype), one1)
        sin = op.Unsqueeze(op.Cast(op.Sin(angles), to=dtype), one2)
        halves = op.Slice(x, start1, end1, [3], [1]), op.Slice(x, start2, end2, [3], [1])
        return x * cos + op.Concat(op.Neg(halves[1]), halves[0], axis=-1) * sin

    def rewrite(self, op: Any, x: Any, freqs: Any, dtype: Any, **_: Any) -> Any:  # type: ignore[override]
        cos, sin = (op.Cast(table, to=dtype) for table in (op.Cos(freqs), op.Sin(freqs)))
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


_HALF_ROTARY_EMBEDDING = RewriteRuleSet([_HalfRotaryEmbedding.rule()])  # type: ignore[no-untyped-call]


def simplify(model: ir.Model) -> None:
    """Fold constants, remove operators without effect, fuse norms and rotary embeddings, and merge equal operators."""
    passes.InlinePass()(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=fold_transpose)
        rewriter.rewrite(model, RULES)
    _merge_equal(model)
    onnx_fusions.fuse(model)
    _HALF_ROTARY_EMBEDDING.apply_to_model(model)
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


def fuse_projections(model: ir.Model, vocab_size: int) -> int:
    """Replace matmuls of the same input with constant weights by one matmul and a Split.

    Returns the number of fused matmuls. Those with as many outputs as the vocabulary stay: a Split would copy the logits.

    Steps of one row take 0.95 of the time on ONNX Runtime's CPU backend."""
    products: dict[FusionKey, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        states, weight = node.inputs[:2] if node.op_type == "MatMul" else (None, None)
        if states is not None and weight is not None and _is_own(weight) and _outputs(weight) != vocab_size:
            products[states, _is_gated(node)].append(node)
    groups = [nodes for nodes in products.values() if len(nodes) > 1]
    for nodes in groups:
        _fuse(model.graph, nodes)
    return len(groups)


def _is_own(weight: ir.Value) -> bool:
    """Whether a weight is a constant without another use; a tied weight in a fused matmul would be stored twice."""
    return weight.is_initializer() and len(weight.uses()) == 1 and weight.shape is not None and len(weight.shape) <= 2


def _is_gated(node: ir.Node) -> bool:
    """Whether a matmul belongs to a gated adapter. Adapters are fused separately: a kernel may sum in another order for
    another width, and rows without adapters must stay bit-identical."""
    return [user.op_type for user in node.outputs[0].consumers()] == ["Where"]


def _fuse(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    sizes = np.array([_outputs(weight) for weight in weights], np.int64)
    product = ir.node("MatMul", [nodes[0].inputs[0], _concatenated(graph, weights)])
    product.outputs[0].type = nodes[0].outputs[0].type
    if (first := nodes[0].outputs[0].shape) is not None:
        product.outputs[0].shape = ir.Shape([*first[:-1], int(sizes.sum())])
    split_sizes = constant(graph, f"{weights[0].name or 'weight'}_sizes", sizes)
    split = ir.node("Split", [product.outputs[0], split_sizes], {"axis": -1}, num_outputs=len(nodes))
    graph.insert_before(nodes[0], [product, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        part.type, part.shape = node.outputs[0].type, node.outputs[0].shape
        node.outputs[0].replace_all_uses_with(part)
        graph.remove(node, safe=True)
    for weight in weights:
        del graph.initializers[str(weight.name)]


def _outputs(weight: ir.Value) -> int:
    assert weight.const_value is not None
    return int(weight.const_value.shape.numpy()[-1])


def _concatenated(graph: ir.Graph, parts: Sequence[ir.Value]) -> ir.Value:
    """Weights concatenated along the output axis."""
    tensors = [part.const_value for part in parts if part.const_value is not None]
    dtype, first = tensors[0].dtype, tensors[0].shape.numpy()
    outputs = sum(tensor.shape.numpy()[-1] for tensor in tensors)

    def concatenate() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=-1), dtype)

    concatenated = lazy(concatenate, dtype, (*first[:-1], outputs))
    return constant(graph, f"{parts[0].name}_joined", concatenated)


def fix_reshapes(model: ir.Model) -> int:
    """Use a constant target shape in every Reshape that allows it; returns the number of changed nodes.

    In the constant, 0 means the size of the same input axis and -1 the remaining size, so at most one size may be -1.
    """
    fixed = 0
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].const_value is not None:
            continue
        target = _constant_target(node)
        if target is not None:
            name = f"shape_{'_'.join(map(str, target))}".replace("-", "m")
            node.replace_input_with(1, constant(model.graph, name, np.array(target, np.int64)))
            node.attributes.pop("allowzero", None)
            fixed += 1
    passes.RemoveUnusedNodesPass()(model)
    return fixed


def _constant_target(node: ir.Node) -> Sequence[int] | None:
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
    whole, axis, users = split.inputs[0], _split_axis(split), _single_users(split)
    if whole is None or whole.shape is None or axis is None or not users:
        return None
    sizes = [user.outputs[0].shape for user in users]
    if any(size is None for size in sizes):
        return None
    kinds = {user.op_type for user in users}
    moved: tuple[ir.Node, int] | None = None
    if kinds == {"Add"} and axis == len(whole.shape) - 1:
        moved = _joined_bias(graph, whole, split, users, axis)
    elif kinds == {"Reshape"} and axis == len(whole.shape) - 1:
        moved = _joined_reshape(graph, whole, users, axis)
    elif kinds == {"Transpose"}:
        moved = _joined_transpose(whole, users, axis)
    return None if moved is None else _split_after(graph, split, users, *moved)


def _joined_bias(
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


def _joined_reshape(
    graph: ir.Graph, whole: ir.Value, users: Sequence[ir.Node], axis: int
) -> tuple[ir.Node, int] | None:
    """One Reshape for all outputs, if each splits its last axis into heads of the same size."""
    heads = set()
    for user in users:
        target = None if user.inputs[1] is None else user.inputs[1].const_value
        sizes = [] if target is None else target.numpy().tolist()
        if len(sizes) != axis + 2 or any(sizes[:axis]) or sizes[-1] < 1 or user.attributes.get_int("allowzero", 0):
            return None
        heads.add(sizes[-1])
    if len(heads) != 1:
        return None
    size = heads.pop()
    shape = np.array([*[0] * axis, -1, size], np.int64)
    return ir.node("Reshape", [whole, constant(graph, f"shape_heads_{axis}_{size}", shape)]), axis


def _joined_transpose(whole: ir.Value, users: Sequence[ir.Node], axis: int) -> tuple[ir.Node, int] | None:
    """One Transpose for all outputs, if their permutations are equal."""
    orders = {tuple(user.attributes.get_ints("perm", ())) for user in users}
    order = orders.pop()
    if orders or axis not in order:
        return None
    return ir.node("Transpose", [whole], {"perm": order}), order.index(axis)


def _split_after(graph: ir.Graph, split: ir.Node, users: Sequence[ir.Node], before: ir.Node, axis: int) -> ir.Node:
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


def _split_axis(split: ir.Node) -> int | None:
    """The axis of a Split as a non-negative number; None if the rank is unknown."""
    shape = None if split.inputs[0] is None else split.inputs[0].shape
    axis = split.attributes.get_int("axis", 0)
    return None if shape is None and axis < 0 else axis % len(shape or range(axis + 1))


def _single_users(split: ir.Node) -> list[ir.Node]:
    """The only user of each output; empty if an output has several users or is a graph output."""
    users = [use.node for part in split.outputs if len(uses := list(part.uses())) == 1 for use in uses]
    one_user_each = len(users) == len(split.outputs) == len(set(map(id, users)))
    has_graph_output = any(user.outputs[0].is_graph_output() for user in users) or any(
        part.is_graph_output() for part in split.outputs
    )
    return users if one_user_each and not has_graph_output else []
