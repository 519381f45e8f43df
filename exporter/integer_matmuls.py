"""Integer products: the products of a traced graph with int8 weights, as operators of ONNX Runtime on integers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from spaceport.exporter.constant_key import Key, WeightNotFound, key_of
from spaceport.exporter.quantized_weights import weight_of
from spaceport.graphs.int8 import LIMB, MOST, NEVER_ZERO, ZERO, InputScale, IntegerLinear, IntegerModel

DOMAIN = "com.microsoft"

# MatMulIntegerToFloat of ONNX Runtime takes unsigned inputs, signed weights and the scales of both, and uses the CPU's integer
# instructions. It is one pass over the sums; MatMulInteger, Cast and Mul are three (36 rows x 4608: 0.89 of the time).
_PRODUCT = "MatMulIntegerToFloat"


@dataclass(frozen=True)
class _Product:
    """A product of the traced graph."""

    node: ir.Node
    name: str  # of its linear module
    layer: IntegerLinear


def store_integer_matmuls(model: ir.Model, integers: IntegerModel) -> None:
    """Put integer products in the place of all products with the model's rounded weights; those of one input are joined."""
    found = _products(model, integers)
    lost = sorted(integers.products.keys() - {product.name for product in found})
    if lost:
        raise WeightNotFound(f"the graph has no product with the weight of {', '.join(lost[:3])} as it is")
    groups: dict[tuple[int, int], list[_Product]] = defaultdict(list)
    for product in found:
        groups[id(product.node.inputs[0]), id(product.layer.input)].append(product)
    writer = _Writer(model, integers)
    if integers.table is not None:
        writer.table()
    for group in groups.values():
        writer.join(group)
    _forget_unused(model)
    model.graph.opset_imports[DOMAIN] = 1


def _products(model: ir.Model, integers: IntegerModel) -> list[_Product]:
    """The products with rounded weights, known by the content of their constants. Modules of equal weights, as in models of
    repeated layers, are taken in their order, which is that of the graph."""
    wanted: dict[Key, list[str]] = defaultdict(list)
    for name, layer in integers.products.items():
        values = layer.values
        for key in {key_of(ir.tensor(values)), key_of(ir.tensor(values.T.contiguous()))}:
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
        place = taken[names[0]] if len(names) > 1 else 0  # one module may be called several times
        if place == len(names):
            raise WeightNotFound(f"the graph has more products with the weight of {names[0]} than modules have it")
        name = names[place]
        taken[names[0]] += 1
        found.append(_Product(node, name, integers.products[name]))
    return found


class _Writer:
    """Writes operators to the end of a graph, which is sorted later; what several products need is written once."""

    def __init__(self, model: ir.Model, integers: IntegerModel) -> None:
        self._graph = model.graph
        self._integers = integers
        self._limbs = integers.limbs
        self._constants: dict[str, ir.Value] = {}
        self._batch: ir.Value | None = None
        self._table_codes: ir.Value | None = None

    def join(self, group: Sequence[_Product]) -> None:
        """One product in the place of those that take the same input."""
        states = group[0].node.inputs[0]
        assert states is not None
        scale = group[0].layer.input
        inputs = group[0].layer.codes.shape[0]
        rows, size = self._rounded(states, scale, inputs, [product.node for product in group])
        bound = scale.kept(inputs, self._limbs)
        factor = bound / MOST / (inputs**0.5 if scale.bound is None and self._limbs == 2 else 1)
        codes, scales = self._weights(group)
        zero, one = self._zero(), self._scalar("integer.step", np.float32(factor))
        product = self._op(_PRODUCT, rows, codes, one, scales, zero, domain=DOMAIN)
        outputs = [product_.layer.codes.shape[1] for product_ in group]
        joined = self._together(product, states, sum(outputs)) if self._limbs == 2 else product
        if size is not None:
            joined = self._op("Mul", joined, size)
        self._hand_over(group, joined, outputs)

    def table(self) -> None:
        """Gather the rows of the input embedding as codes and scale them."""
        table = self._integers.table
        assert table is not None
        wanted = {key_of(ir.tensor(table.values))}
        for node in list(self._graph):
            weight = node.inputs[0] if node.op_type == "Gather" else None
            if weight is None or weight.const_value is None or key_of(weight.const_value) not in wanted:
                continue
            codes, scale = self._codes_of_table(), self._constant("embedding.scale", table.scale[:, None].numpy())
            rows = self._op("Cast", self._op("Gather", codes, node.inputs[1], axis=0), to=ir.DataType.FLOAT)
            scaled = self._op("Mul", rows, self._op("Gather", scale, node.inputs[1], axis=0))
            self._replace(node, scaled)
            return
        raise WeightNotFound("the graph does not gather from the input embedding as it is")

    def _rounded(
        self, states: ir.Value, scale: InputScale, inputs: int, users: Sequence[ir.Node]
    ) -> tuple[ir.Value, ir.Value | None]:
        """An input as unsigned bytes, its limbs one behind the other, and what its rows are to be multiplied by."""
        moved, size = self._scaled(states, scale, inputs, users)
        bound = scale.kept(inputs, self._limbs)
        step, zero = np.float32(bound / MOST), self._zero()
        high = self._op("QuantizeLinear", moved, self._scalar("integer.step", step), zero)
        if self._limbs == 1:
            return high, size
        kept = self._op("DequantizeLinear", high, self._scalar("integer.step", step), zero)
        rest = self._op("Sub", moved, kept)
        low = self._op("QuantizeLinear", rest, self._scalar("integer.step", np.float32(step / LIMB)), zero)
        return self._op("Concat", high, low, axis=0), size

    def _scaled(
        self, states: ir.Value, scale: InputScale, inputs: int, users: Sequence[ir.Node]
    ) -> tuple[ir.Value, ir.Value | None]:
        """An input divided by what its scale says, and the size of its rows if they were divided by it."""
        moves = None if scale.move is None else (1 / scale.move).numpy()
        if scale.bound is None and self._limbs == 2:
            gains = np.ones(inputs, np.float32) if moves is None else moves
            normed = self._op(
                "RMSNormalization", states, self._constant("integer.gain", gains), axis=-1, epsilon=NEVER_ZERO
            )
            axes = self._constant("integer.last", np.array([-1], np.int64))
            return normed, self._op("ReduceL2", states, axes, keepdims=1)
        moved = states if moves is None else self._moved(states, moves, users)
        if scale.bound is not None:
            return moved, None
        axes = self._constant("integer.last", np.array([-1], np.int64))
        size = self._op("ReduceMax", self._op("Abs", moved), axes, keepdims=1)
        size = self._op("Max", size, self._scalar("integer.tiny", np.float32(NEVER_ZERO)))
        return self._op("Div", moved, size), size

    def _moved(self, states: ir.Value, moves: np.ndarray[Any, Any], users: Sequence[ir.Node]) -> ir.Value:
        """An input times a factor for each channel: in the gain of the norm that it comes from, if it has no other use."""
        norm = states.producer()
        gain = None if norm is None or norm.op_type != "RMSNormalization" else norm.inputs[1]
        alone = {id(user) for user in states.consumers()} <= {id(user) for user in users}
        if norm is None or gain is None or gain.const_value is None or not alone or states.is_graph_output():
            return self._op("Mul", states, self._constant("integer.move", moves))
        norm.replace_input_with(1, self._constant("integer.gain", gain.const_value.numpy() * moves))
        return states

    def _weights(self, group: Sequence[_Product]) -> tuple[ir.Value, ir.Value]:
        """The codes and the scales of joined products."""
        name = group[0].name
        scales = np.concatenate([product.layer.scale.numpy() for product in group])
        if self._integers.tied and self._integers.table is not None and self._is_table(group):
            codes = self._op("Transpose", self._codes_of_table(), perm=[1, 0])
        else:
            joined = torch.cat([product.layer.codes for product in group], dim=1)
            codes = self._constant(f"{name}.codes", joined.numpy())
        return codes, self._constant(f"{name}.scale", scales)

    def _is_table(self, group: Sequence[_Product]) -> bool:
        table = self._integers.table
        return table is not None and len(group) == 1 and group[0].layer.codes.data_ptr() == table.codes.data_ptr()

    def _codes_of_table(self) -> ir.Value:
        assert self._integers.table is not None
        if self._table_codes is None:
            self._table_codes = self._constant("embedding.codes", self._integers.table.codes.numpy())
        return self._table_codes

    def _together(self, product: ir.Value, states: ir.Value, outputs: int) -> ir.Value:
        """The sum of the limbs' products. As a product of 1 x 2 and 2 x all it takes half of the time of a Split, a Mul and an
        Add; the low limb's factor is a power of two, so that only the sum is rounded, in whatever order."""
        pair = self._constant("integer.pair", np.array([2, -1], np.int64))
        factors = self._constant("integer.factors", np.array([[1, 1 / LIMB]], np.float32))
        joined = self._op("MatMul", factors, self._op("Reshape", product, pair))
        return self._op("Reshape", joined, self._shape(states, outputs))

    def _shape(self, states: ir.Value, outputs: int) -> ir.Value:
        rank = None if states.shape is None else len(states.shape)
        if rank == 2:
            return self._constant("integer.shape", np.array([-1, outputs], np.int64))
        if rank != 3:
            raise WeightNotFound(f"the input of a product has {rank} dimensions, expected 2 or 3")
        name = f"integer.shape.{outputs}"
        if name not in self._constants:
            if self._batch is None:
                self._batch = self._op("Shape", self._graph.inputs[0], start=0, end=1)
            rest = self._constant("integer.rest", np.array([-1, outputs], np.int64))
            self._constants[name] = self._op("Concat", self._batch, rest, axis=0)
        return self._constants[name]

    def _hand_over(self, group: Sequence[_Product], joined: ir.Value, outputs: Sequence[int]) -> None:
        """Let the users of each product take their part."""
        if len(group) == 1:
            parts: Sequence[ir.Value] = [joined]
        else:
            sizes = self._constant("integer.sizes", np.array(outputs, np.int64))
            split = ir.node("Split", [joined, sizes], {"axis": -1}, num_outputs=len(group))
            self._graph.append(split)
            parts = split.outputs
        for product, part in zip(group, parts, strict=True):
            bias = product.node.inputs[2] if product.node.op_type == "Gemm" and len(product.node.inputs) > 2 else None
            self._replace(product.node, part if bias is None else self._op("Add", part, bias))

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        old = node.outputs[0]
        value.type, value.shape = old.type, old.shape
        if old.is_graph_output() or (old.name or "").startswith("layers."):
            value.name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)

    def _zero(self) -> ir.Value:
        return self._constant("integer.zero", np.array(ZERO, np.uint8))

    def _scalar(self, name: str, number: np.float32) -> ir.Value:
        return self._constant(name, np.array(number, np.float32))

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A constant with this name, or a longer one, and this content. Products never share their codes: on CPUs that need
        unsigned weights ONNX Runtime cannot convert them twice."""
        key = f"{name} {array.dtype} {array.shape} {sha256(np.ascontiguousarray(array).data).hexdigest()}"
        if key not in self._constants:
            named = f"{name}.{len(self._constants)}" if name in self._graph.initializers else name
            tensor = ir.tensor(array, name=named)
            value = ir.Value(
                name=named, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
            )
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def _op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, domain=domain)
        self._graph.append(node)
        return node.outputs[0]


def _forget_unused(model: ir.Model) -> None:
    """Remove the constants, and the nodes over them, that nothing takes any more."""
    for node in list(model.graph):
        if node.op_type == "Transpose" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
