"""Integer matmuls: replace the matmuls of a traced graph by int8 matmuls of ONNX Runtime."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from spaceport.exporter.constant_key import Key, WeightNotFound, key_of
from spaceport.exporter.lazy_constants import lazy
from spaceport.exporter.quantized_weights import weight_of
from spaceport.exporter.simplify import MICROSOFT
from spaceport.graphs.int8 import (
    EPSILON,
    INT8_MAX,
    LIMB_BASE,
    ZERO_POINT,
    AttentionScales,
    IntegerLinear,
    IntegerModel,
    clip_range,
)

PLACES = "spaceport.int8"  # metadata of a graph: where the codes and scales of each linear module are, as JSON
ATTENTION = "spaceport.int8_attention"  # metadata of a graph: the scales of each layer's attention, as JSON
EMBEDDING = ""  # the name of the input embedding there

# Names of the constants with the codes and the scales of a linear module, its first column in them, and the one behind
# its last.
Place = tuple[str, str, int, int]

# MatMulIntegerToFloat of ONNX Runtime takes uint8 inputs, int8 weights and the scales of both, and uses the CPU's int8
# instructions. It makes one pass over the sums; MatMulInteger, Cast and Mul make three (36 rows x 4608: 0.89 of the
# time).
_MATMUL = "MatMulIntegerToFloat"


@dataclass(frozen=True)
class _Matmul:
    """A matmul of the traced graph."""

    node: ir.Node
    name: str  # of the linear module
    layer: IntegerLinear


def store_integer_matmuls(model: ir.Model, integers: IntegerModel) -> None:
    """Replace all matmuls with the model's quantized weights by int8 matmuls.

    Modules of one parent with the same input are fused. Where the codes of each module are is stored beside the graph."""
    found = _matmuls(model, integers)
    missing = sorted(integers.layers.keys() - {matmul.name for matmul in found})
    if missing:
        raise WeightNotFound(f"the graph has no matmul with the unchanged weight of {', '.join(missing[:3])}")
    groups: dict[tuple[int, str], list[_Matmul]] = defaultdict(list)
    for matmul in found:
        groups[id(matmul.node.inputs[0]), matmul.name.rpartition(".")[0]].append(matmul)
    writer = _Writer(model, integers)
    if integers.embedding is not None:
        writer.replace_embedding()
    for group in groups.values():
        writer.replace_matmuls(group)
    _remove_unused(model)
    model.graph.opset_imports[MICROSOFT] = 1
    model.metadata_props[PLACES] = json.dumps(writer.places)
    model.metadata_props[ATTENTION] = json.dumps(
        [{name: tensor.tolist() for name, tensor in vars(scales).items()} for scales in integers.attention]
    )


def stored_scales(text: str) -> tuple[AttentionScales, ...]:
    """The scales of the attention in the metadata of a graph."""
    return tuple(
        AttentionScales(**{name: torch.tensor(values) for name, values in scales.items()})
        for scales in json.loads(text)
    )


def _matmuls(model: ir.Model, integers: IntegerModel) -> list[_Matmul]:
    """The matmuls with quantized weights, identified by the content of their constants.

    Modules with equal weights, as in models with repeated layers, are matched in their order, which is that of the
    graph."""
    wanted: dict[Key, list[str]] = defaultdict(list)
    for name, layer in integers.layers.items():
        weight = layer.dequantized
        for key in {key_of(ir.tensor(weight)), key_of(ir.tensor(weight.T.contiguous()))}:
            wanted[key].append(name)
    known: dict[int, list[str]] = {}
    taken: Counter[str] = Counter()
    found = []
    for node in model.graph:
        constant = weight_of(node)
        if constant is None or constant.const_value is None:
            continue
        if id(constant) not in known:
            known[id(constant)] = wanted.get(key_of(constant.const_value), [])
        if not (names := known[id(constant)]):
            continue
        index = taken[names[0]] if len(names) > 1 else 0  # one module may be called several times
        if index == len(names):
            raise WeightNotFound(
                f"the graph has more matmuls with the weight of {names[0]} than there are modules with this weight"
            )
        name = names[index]
        taken[names[0]] += 1
        found.append(_Matmul(node, name, integers.layers[name]))
    return found


class _Writer:
    """Appends operators to a graph, which is sorted later; values that several matmuls need are computed once."""

    def __init__(self, model: ir.Model, integers: IntegerModel) -> None:
        self._graph = model.graph
        self._integers = integers
        self._limbs = integers.limbs
        self.places: dict[str, Place] = {}
        self._constants: dict[str, ir.Value] = {}
        self._batch: ir.Value | None = None
        self._embedding_codes: ir.Value | None = None

    def replace_matmuls(self, group: Sequence[_Matmul]) -> None:
        """Replace matmuls with the same input by one int8 matmul."""
        states = group[0].node.inputs[0]
        assert states is not None
        inputs = group[0].layer.codes.shape[0]
        step = clip_range(inputs, self._limbs) / INT8_MAX
        rows, size = self._quantized(states, inputs, np.float32(step))
        codes, scales = self._weights(group)
        # the size of a row is the root of a sum of squares here, and that of their mean in `step`
        factor = step / (inputs**0.5 if self._limbs == 2 else 1)
        result = self._op(
            _MATMUL, rows, codes, self._scalar(np.float32(factor)), scales, self._zero(), domain=MICROSOFT
        )
        outputs = [matmul.layer.codes.shape[1] for matmul in group]
        combined = self._add_limbs(result, states, sum(outputs)) if self._limbs == 2 else result
        scaled = self._op("Mul", combined, size)
        if states.shape is not None:
            scaled.type, scaled.shape = states.type, ir.Shape([*states.shape[:-1], sum(outputs)])
        self._replace_outputs(group, scaled, outputs)

    def replace_embedding(self) -> None:
        """Replace the Gather from the input embedding by Gathers of int8 codes and scales."""
        embedding = self._integers.embedding
        assert embedding is not None
        wanted = {key_of(ir.tensor(embedding.dequantized))}
        for node in list(self._graph):
            weight = node.inputs[0] if node.op_type == "Gather" else None
            if weight is None or weight.const_value is None or key_of(weight.const_value) not in wanted:
                continue
            codes = self._codes_of_embedding()
            scale = self._constant("embedding.scale", embedding.scale[:, None].numpy())
            self.places[EMBEDDING] = (str(codes.name), str(scale.name), 0, embedding.codes.shape[1])
            rows = self._op("Cast", self._op("Gather", codes, node.inputs[1], axis=0), to=ir.DataType.FLOAT)
            scaled = self._op("Mul", rows, self._op("Gather", scale, node.inputs[1], axis=0))
            self._replace(node, scaled)
            return
        raise WeightNotFound("the graph does not gather from the unchanged input embedding")

    def _quantized(self, states: ir.Value, inputs: int, step: np.float32) -> tuple[ir.Value, ir.Value]:
        """An input in uint8 with its limbs concatenated along the rows, and the size of each row."""
        relative, size = self._scaled(states, inputs)
        high = self._op("QuantizeLinear", relative, self._scalar(step), self._zero())
        if self._limbs == 1:
            return high, size
        dequantized = self._op("DequantizeLinear", high, self._scalar(step), self._zero())
        rest = self._op("Sub", relative, dequantized)
        low = self._op("QuantizeLinear", rest, self._scalar(np.float32(step / LIMB_BASE)), self._zero())
        return self._op("Concat", high, low, axis=0), size

    def _scaled(self, states: ir.Value, inputs: int) -> tuple[ir.Value, ir.Value]:
        """An input divided by the size of each row, and that size."""
        axes = self._constant("integer.last", np.array([-1], np.int64))
        if self._limbs == 2:
            gain = self._constant("integer.gain", np.ones(inputs, np.float32))
            normed = self._op("RMSNormalization", states, gain, axis=-1, epsilon=EPSILON)
            return normed, self._op("ReduceL2", states, axes, keepdims=1)
        # A row of zeros is divided by zero, and whatever that is quantized to is multiplied by zero behind the matmul.
        size = self._op("ReduceMax", self._op("Abs", states), axes, keepdims=1)
        return self._op("Div", states, size), size

    def _weights(self, group: Sequence[_Matmul]) -> tuple[ir.Value, ir.Value]:
        """The codes and the scales of fused matmuls."""
        name = group[0].name
        scales = self._constant(f"{name}.scale", np.concatenate([matmul.layer.scale.numpy() for matmul in group]))
        if self._integers.tied and self._is_embedding(group):
            return self._op("Transpose", self._codes_of_embedding(), perm=[1, 0]), scales
        codes = self._lazy_constant(f"{name}.codes", partial(_codes_of_all, group))
        start = 0
        for matmul in group:
            end = start + matmul.layer.codes.shape[1]
            self.places[matmul.name] = (str(codes.name), str(scales.name), start, end)
            start = end
        return codes, scales

    def _is_embedding(self, group: Sequence[_Matmul]) -> bool:
        embedding = self._integers.embedding
        if embedding is None or len(group) != 1:
            return False
        return group[0].layer.codes.data_ptr() == embedding.codes.data_ptr()

    def _codes_of_embedding(self) -> ir.Value:
        assert self._integers.embedding is not None
        if self._embedding_codes is None:
            self._embedding_codes = self._constant("embedding.codes", self._integers.embedding.codes.numpy())
        return self._embedding_codes

    def _add_limbs(self, result: ir.Value, states: ir.Value, outputs: int) -> ir.Value:
        """The sum of the results of both limbs, as a matmul of 1 x 2 and 2 x all: half the time of Split, Mul and Add.

        The factor of the low limb is a power of two, so only the sum is rounded, independent of its order."""
        pair = self._constant("integer.pair", np.array([2, -1], np.int64))
        factors = self._constant("integer.factors", np.array([[1, 1 / LIMB_BASE]], np.float32))
        combined = self._op("MatMul", factors, self._op("Reshape", result, pair))
        return self._op("Reshape", combined, self._shape(states, outputs))

    def _shape(self, states: ir.Value, outputs: int) -> ir.Value:
        rank = None if states.shape is None else len(states.shape)
        if rank == 2:
            return self._constant("integer.shape", np.array([-1, outputs], np.int64))
        if rank != 3:
            raise WeightNotFound(f"the input of a matmul has {rank} dimensions: expected 2 or 3")
        name = f"integer.shape.{outputs}"
        if name not in self._constants:
            if self._batch is None:
                self._batch = self._op("Shape", self._graph.inputs[0], start=0, end=1)
            rest = self._constant("integer.rest", np.array([-1, outputs], np.int64))
            self._constants[name] = self._op("Concat", self._batch, rest, axis=0)
        return self._constants[name]

    def _replace_outputs(self, group: Sequence[_Matmul], combined: ir.Value, outputs: Sequence[int]) -> None:
        """Replace the output of each matmul by its part of the fused result."""
        if len(group) == 1:
            parts: Sequence[ir.Value] = [combined]
        else:
            sizes = self._constant("integer.sizes", np.array(outputs, np.int64))
            split = ir.node("Split", [combined, sizes], {"axis": -1}, num_outputs=len(group))
            self._graph.append(split)
            parts = split.outputs
        for matmul, part in zip(group, parts, strict=True):
            bias = matmul.node.inputs[2] if matmul.node.op_type == "Gemm" and len(matmul.node.inputs) > 2 else None
            self._replace(matmul.node, part if bias is None else self._op("Add", part, bias))

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        old = node.outputs[0]
        value.type, value.shape = old.type, old.shape
        if old.is_graph_output() or (old.name or "").startswith("layers."):
            value.name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)

    def _zero(self) -> ir.Value:
        return self._constant("integer.zero", np.array(ZERO_POINT, np.uint8))

    def _scalar(self, number: np.float32) -> ir.Value:
        return self._constant("integer.step", np.array(number, np.float32))

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A constant with this content; a number is appended to the name if it is used for other content.

        Matmuls never share codes: on CPUs that need unsigned weights, ONNX Runtime cannot convert the same codes twice.
        """
        return self._unique(name, array, ir.tensor(array))

    def _lazy_constant(self, name: str, compute: Callable[[], np.ndarray[Any, Any]]) -> ir.Value:
        """A constant whose content is computed again when it is written."""
        array = compute()
        content = lazy(lambda: ir.tensor(compute()), ir.DataType.from_numpy(array.dtype), array.shape)
        return self._unique(name, array, content)

    def _unique(self, name: str, array: np.ndarray[Any, Any], tensor: ir.TensorProtocol) -> ir.Value:
        key = f"{name} {array.dtype} {array.shape} {sha256(np.ascontiguousarray(array).data).hexdigest()}"
        if key not in self._constants:
            tensor.name = f"{name}.{len(self._constants)}" if name in self._graph.initializers else name
            value = ir.Value(
                name=tensor.name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
            )
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def _op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, domain=domain)
        self._graph.append(node)
        return node.outputs[0]


def _codes_of_all(group: Sequence[_Matmul]) -> np.ndarray[Any, Any]:
    """The codes of fused matmuls beside each other."""
    return np.concatenate([matmul.layer.codes.numpy() for matmul in group], axis=1)


def _remove_unused(model: ir.Model) -> None:
    """Remove unused constants, and unused Transpose nodes of constants."""
    for node in list(model.graph):
        if node.op_type == "Transpose" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
