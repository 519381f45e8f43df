"""Rewrite a traced graph: with fewer operators that compute the same, and with weights in few bits.

Constants are shared by name, identified by content, and computed when they are compared or written. Weights that an
engine computes with are thus the traced ones to the bit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.exporter.native_weights import Matrix, format_of_matrix, rounded
from spaceport.graphs.parts import BLOCK
from spaceport.graphs.quantization import Quantization, linear_modules
from spaceport.graphs.streamed_weights import source_of, transposed_values_of, values_of
from spaceport.kernels.native_library import DOMAIN, VERSION

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

# Shape of a constant, and SHA-256 of its content.
_Key = tuple[tuple[int, ...], bytes]


def _key_of(tensor: ir.TensorProtocol) -> _Key:
    """The key of a constant: its shape and the digest of its content."""
    content = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return tuple(tensor.shape.numpy()), sha256(content.data).digest()


def _constant(graph: ir.Graph, name: str, array: NDArray[np.generic] | ir.TensorProtocol) -> ir.Value:
    """The initializer with this name, created from the array if missing; a name must determine the content."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = array if isinstance(array, ir.TensorProtocol) else ir.tensor(array)
    tensor.name = name
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.register_initializer(value)
    return value


def _lazy(
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


def _fold_transpose(node: ir.Node) -> bool | None:
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
    transposed = _lazy(_transposed(tensor, order), tensor.dtype, shape, old.name)
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
        optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=_fold_transpose)
        rewriter.rewrite(model, RULES)
    _merge_equal(model)
    onnx_fusions.fuse(model)
    _HALF_ROTARY_EMBEDDING.apply_to_model(model)
    _merge_equal(model)  # each fused rotary embedding has its own Cos and Sin


def _merge_equal(model: ir.Model) -> None:
    passes.RemoveUnusedNodesPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass(_SHARED)(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)


def fix_reshapes(model: ir.Model) -> None:
    """Use a constant target shape in every Reshape that allows it.

    In the constant, 0 means the size of the same input axis and -1 the remaining size, so at most one size may be -1.
    """
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].const_value is not None:
            continue
        target = _constant_target(node)
        if target is not None:
            name = f"shape_{'_'.join(map(str, target))}".replace("-", "m")
            node.replace_input_with(1, _constant(model.graph, name, np.array(target, np.int64)))
            node.attributes.pop("allowzero", None)
    passes.RemoveUnusedNodesPass()(model)


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


class WeightNotFound(ValueError):
    """The graph does not use a quantized weight unchanged; the message names its layer."""


def _weight_of(node: ir.Node) -> ir.Value | None:
    """The constant weight of a matmul, also behind a Transpose (tied embeddings); None if it has none."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight = producer.inputs[0]
    return weight if weight is not None and weight.is_initializer() else None


def _matmuls_of(model: ir.Model, weights: Mapping[str, Tensor]) -> list[tuple[ir.Node, str]]:
    """The matmuls with these weights, also transposed, and the names of their linear modules.

    Modules with equal weights, as in models with repeated layers, are matched in their order, which is that of the graph."""
    wanted: dict[_Key, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        for key in {_key_of(ir.tensor(weight)), _key_of(ir.tensor(weight.T.contiguous()))}:
            wanted[key].append(name)
    known: dict[int, list[str]] = {}
    taken: Counter[str] = Counter()
    matmuls: list[tuple[ir.Node, str]] = []
    for node in model.graph:
        weight_constant = _weight_of(node)
        if weight_constant is None or weight_constant.const_value is None:
            continue
        if id(weight_constant) not in known:
            known[id(weight_constant)] = wanted.get(_key_of(weight_constant.const_value), [])
        if not (names := known[id(weight_constant)]):
            continue
        index = taken[names[0]] if len(names) > 1 else 0  # one module may be called several times
        if index == len(names):
            raise WeightNotFound(
                f"the graph has more matmuls with the weight of {names[0]} than there are modules with this weight"
            )
        taken[names[0]] += 1
        matmuls.append((node, names[index]))
    if missing := sorted(weights.keys() - {name for _, name in matmuls}):
        raise WeightNotFound(f"the graph has no matmul with the unchanged weight of {', '.join(missing[:3])}")
    return matmuls


def _four_bits(codes: Tensor) -> ir.TensorProtocol:
    """Int4 codes, which are packed in pairs when they are written."""
    return _lazy(lambda: ir.tensor(codes.numpy(), ir.DataType.INT4), ir.DataType.INT4, codes.shape)


def store_quantized_weights(model: ir.Model, quantization: Quantization) -> None:
    """Replace every constant with a dequantized weight by its codes and scales, and DequantizeLinear before each matmul."""
    dequantized = {name: layer.dequantized for name, layer in quantization.layers.items()}
    for node, name in _matmuls_of(model, dequantized):
        layer = quantization.layers[name]
        codes = _four_bits(layer.codes) if quantization.weights == "int4" else ir.tensor(layer.codes)
        stored = [
            _constant(model.graph, f"{name}.{part}", tensor)
            for part, tensor in (("codes", codes), ("scale", ir.tensor(layer.scale)))
        ]
        blocks = {"axis": 1} if layer.block is None else {"axis": 0, "block_size": layer.block}
        weight = ir.node("DequantizeLinear", stored, blocks)
        weight.outputs[0].type = stored[1].type
        weight.outputs[0].shape = ir.Shape(layer.codes.shape)
        model.graph.insert_before(node, weight)
        node.replace_input_with(1, weight.outputs[0])
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
    passes.RemoveUnusedNodesPass()(model)


def _native_matrices(model: PreTrainedModel, format_name: str) -> dict[str, Matrix]:
    """The matrices of linear modules in a native format, by name; the output embedding in that of tables."""
    matrices = {
        name: rounded(module.weight, format_of_matrix(name, module.weight, format_name))
        for name, module in linear_modules(model).items()
        if module.in_features % BLOCK == 0
    }
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.in_features % BLOCK == 0:
        name = next(name for name, module in model.named_modules() if module is head)
        matrices[name] = rounded(head.weight, format_name, table=True)
    return matrices


def _packed(matrix: Matrix) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate(list(matrix.packed())))


def store_native_products(model: ir.Model, traced: PreTrainedModel, format_name: str) -> None:
    """Replace the matmuls of the traced model's linear modules by native products."""
    matrices = _native_matrices(traced, format_name)
    weights = {name: values_of(traced.get_submodule(name).weight) for name in matrices}  # type: ignore[arg-type]
    for node, name in _matmuls_of(model, weights):
        matrix, graph = matrices[name], model.graph
        packed = _lazy(partial(_packed, matrix), ir.DataType.UINT8, (matrix.bytes,))
        width = _constant(graph, f"native.width.{matrix.outputs}", np.array([matrix.outputs], np.int64))
        inputs = _constant(graph, f"native.inputs.{matrix.inputs}", np.array([-1, matrix.inputs], np.int64))
        shape = ir.node("Shape", [node.inputs[0]], {"start": 0, "end": -1})
        flat = ir.node("Reshape", [node.inputs[0], inputs])
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        product = ir.node(
            "NormProduct",
            [flat.outputs[0], None, None, _constant(graph, f"{name}.packed", packed), bias],
            {
                "norm": "none",
                "epsilon": 0.0,
                "activation": "none",
                "widths": [matrix.outputs],
                "formats": matrix.format.name,
                "rank": 0,
            },
            domain=DOMAIN,
        )
        whole = ir.node("Concat", [shape.outputs[0], width], {"axis": 0})
        back = ir.node("Reshape", [product.outputs[0], whole.outputs[0]])
        new, old = [shape, flat, product, whole, back], node.outputs[0]
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [old], back.outputs)
    model.opset_imports[DOMAIN] = VERSION
    passes.RemoveUnusedNodesPass()(model)
