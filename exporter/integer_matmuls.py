"""Replace the matmuls of a traced graph by int8 matmuls of ONNX Runtime."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

from spaceport.exporter.graph_passes import constant, lazy
from spaceport.exporter.quantized_weights import (
    ATTENTION,
    EMBEDDING,
    PLACES,
    Place,
    QuantizedMatmul,
    WeightNotFound,
    quantized_matmuls,
    store_embedding,
)
from spaceport.graphs.quantization import EPSILON, INT8_MAX, LIMB_BASE, ZERO_POINT, Quantization, clip_range

# MatMulIntegerToFloat of ONNX Runtime takes uint8 inputs, int8 weights and the scales of both, and uses the CPU's int8
# instructions. It makes one pass over the sums; MatMulInteger, Cast and Mul make three (36 rows x 4608: 0.89 of the
# time).
_MATMUL = "MatMulIntegerToFloat"
_DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators


def store_integer_matmuls(model: ir.Model, quantization: Quantization) -> None:
    """Replace all matmuls with the model's quantized weights by int8 matmuls.

    Modules of one parent with the same input are fused. Where the codes of each module are is stored beside the graph."""
    groups: dict[tuple[int, str], list[QuantizedMatmul]] = defaultdict(list)
    for matmul in quantized_matmuls(model, quantization.layers):
        groups[id(matmul.node.inputs[0]), matmul.name.rpartition(".")[0]].append(matmul)
    writer = _Writer(model, quantization)
    for group in groups.values():
        writer.replace_matmuls(group)
    passes.RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[_DOMAIN] = 1
    model.metadata_props[PLACES] = json.dumps(writer.places)
    model.metadata_props[ATTENTION] = json.dumps(
        [{name: tensor.tolist() for name, tensor in vars(scales).items()} for scales in quantization.attention]
    )


class _Writer:
    """Appends operators to a graph, which is sorted later; values that several matmuls need are computed once."""

    def __init__(self, model: ir.Model, quantization: Quantization) -> None:
        self._graph = model.graph
        self._limbs = quantization.limbs
        self._shapes: dict[int, ir.Value] = {}  # of results, by the number of outputs
        self.places: dict[str, Place] = {}
        self._tied = quantization.embedding if quantization.tied else None
        if quantization.embedding is not None:
            self._table, scale = store_embedding(model, quantization.embedding)
            self.places[EMBEDDING] = (str(self._table.name), str(scale.name), 0, len(quantization.embedding.codes))

    def replace_matmuls(self, group: Sequence[QuantizedMatmul]) -> None:
        """Replace matmuls with the same input by one int8 matmul."""
        states = group[0].node.inputs[0]
        assert states is not None
        inputs = group[0].layer.codes.shape[0]
        step = clip_range(inputs, self._limbs) / INT8_MAX
        rows, size = self._quantized(states, inputs, step)
        codes, scales = self._weights(group)
        # the size of a row is the root of a sum of squares here, and that of their mean in `step`
        factor = self._step(step / (inputs**0.5 if self._limbs == 2 else 1))
        result = self._op(_MATMUL, rows, codes, factor, scales, self._zero(), domain=_DOMAIN)
        outputs = [matmul.layer.codes.shape[1] for matmul in group]
        combined = self._add_limbs(result, states, sum(outputs)) if self._limbs == 2 else result
        scaled = self._op("Mul", combined, size)
        if states.shape is not None:
            scaled.type, scaled.shape = states.type, ir.Shape([*states.shape[:-1], sum(outputs)])
        self._replace_outputs(group, scaled, outputs)

    def _quantized(self, states: ir.Value, inputs: int, step: float) -> tuple[ir.Value, ir.Value]:
        """An input in uint8 with its limbs concatenated along the rows, and the size of each row."""
        relative, size = self._scaled(states, inputs)
        high = self._op("QuantizeLinear", relative, self._step(step), self._zero())
        if self._limbs == 1:
            return high, size
        dequantized = self._op("DequantizeLinear", high, self._step(step), self._zero())
        rest = self._op("Sub", relative, dequantized)
        low = self._op("QuantizeLinear", rest, self._step(step / LIMB_BASE), self._zero())
        return self._op("Concat", high, low, axis=0), size

    def _scaled(self, states: ir.Value, inputs: int) -> tuple[ir.Value, ir.Value]:
        """An input divided by the size of each row, and that size."""
        axes = self._constant("last", np.array([-1], np.int64))
        if self._limbs == 2:
            gain = self._constant(f"gain.{inputs}", np.ones(inputs, np.float32))
            normed = self._op("RMSNormalization", states, gain, axis=-1, epsilon=EPSILON)
            return normed, self._op("ReduceL2", states, axes, keepdims=1)
        # A row of zeros is divided by zero, and whatever that is quantized to is multiplied by zero behind the matmul.
        size = self._op("ReduceMax", self._op("Abs", states), axes, keepdims=1)
        return self._op("Div", states, size), size

    def _weights(self, group: Sequence[QuantizedMatmul]) -> tuple[ir.Value, ir.Value]:
        """The codes and the scales of fused matmuls.

        Matmuls never share codes: on CPUs that need unsigned weights, ONNX Runtime cannot convert the same codes twice."""
        layers = [matmul.layer for matmul in group]
        parent, _, first = group[0].name.rpartition(".")
        name = ".".join([*filter(None, [parent]), "_".join([first, *(m.name.rpartition(".")[2] for m in group[1:])])])
        scales = constant(self._graph, f"{name}.scale", np.concatenate([layer.scale.numpy() for layer in layers]))
        if self._tied is not None and layers[0].codes.data_ptr() == self._tied.codes.data_ptr():
            return self._op("Transpose", self._table, perm=[1, 0]), scales
        ends = np.cumsum([layer.codes.shape[1] for layer in layers]).tolist()

        def codes() -> ir.TensorProtocol:
            return ir.tensor(np.concatenate([layer.codes.numpy() for layer in layers], axis=1))

        stored = lazy(codes, ir.DataType.INT8, (len(layers[0].codes), ends[-1]))
        value = constant(self._graph, f"{name}.codes", stored)
        for matmul, end in zip(group, ends, strict=True):
            start = end - matmul.layer.codes.shape[1]
            self.places[matmul.name] = (str(value.name), str(scales.name), start, end)
        return value, scales

    def _add_limbs(self, result: ir.Value, states: ir.Value, outputs: int) -> ir.Value:
        """The sum of the results of both limbs, as a matmul of 1 x 2 and 2 x all: half the time of Split, Mul and Add.

        The factor of the low limb is a power of two, so only the sum is rounded, independent of its order."""
        pair = self._constant("pair", np.array([2, -1], np.int64))
        factors = self._constant("factors", np.array([[1, 1 / LIMB_BASE]], np.float32))
        combined = self._op("MatMul", factors, self._op("Reshape", result, pair))
        return self._op("Reshape", combined, self._shape(states, outputs))

    def _shape(self, states: ir.Value, outputs: int) -> ir.Value:
        rank = None if states.shape is None else len(states.shape)
        rest = self._constant(f"rest.{outputs}", np.array([-1, outputs], np.int64))
        if rank == 2:
            return rest
        if rank != 3:
            raise WeightNotFound(f"the input of a matmul has {rank} dimensions: expected 2 or 3")
        if outputs not in self._shapes:
            batch = self._op("Shape", self._graph.inputs[0], start=0, end=1)
            self._shapes[outputs] = self._op("Concat", batch, rest, axis=0)
        return self._shapes[outputs]

    def _replace_outputs(self, group: Sequence[QuantizedMatmul], combined: ir.Value, outputs: Sequence[int]) -> None:
        """Replace the output of each matmul by its part of the fused result."""
        parts: Sequence[ir.Value] = [combined]
        if len(group) > 1:
            sizes = constant(self._graph, f"sizes_{'_'.join(map(str, outputs))}", np.array(outputs, np.int64))
            split = ir.node("Split", [combined, sizes], {"axis": -1}, num_outputs=len(group))
            self._graph.append(split)
            parts = split.outputs
        for matmul, part in zip(group, parts, strict=True):
            bias = matmul.node.inputs[2] if matmul.node.op_type == "Gemm" and len(matmul.node.inputs) > 2 else None
            new, old = part if bias is None else self._op("Add", part, bias), matmul.node.outputs[0]
            new.type, new.shape = old.type, old.shape
            if old.is_graph_output() or (old.name or "").startswith("layers."):
                new.name, old.name = old.name, None
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            self._graph.remove(matmul.node, safe=True)

    def _zero(self) -> ir.Value:
        return self._constant("zero", np.array(ZERO_POINT, np.uint8))

    def _step(self, step: float) -> ir.Value:
        return self._constant(f"step.{step!r}", np.array(step, np.float32))

    def _constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        return constant(self._graph, f"integer.{name}", array)

    def _op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, domain=domain)
        self._graph.append(node)
        return node.outputs[0]
