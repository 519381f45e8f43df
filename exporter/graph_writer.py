"""Write the nodes, constants and weights of a graph of native operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from spaceport.exporter.native_weights import Matrix
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature
from spaceport.graphs.contract.signature import Tensor as SignatureTensor
from spaceport.graphs.parts import Norm
from spaceport.kernels.functions import add_functions
from spaceport.kernels.native_library import DOMAIN

OPSET, _IR_VERSION = 23, 11
_ALIGNMENT = 4096  # of weights in their file, so that they are mapped

FusedNorm = tuple[list[str], dict[str, Any]]  # inputs and attributes of a norm that is part of a product
NO_NORM: FusedNorm = (["", ""], {"norm": "none", "epsilon": 0.0})


class GraphWriter:
    """A graph and, in the file beside it, its weights; methods that add nodes return the names of their outputs."""

    def __init__(self, folder: Path, signature: Signature) -> None:
        self.folder, self.signature = folder, signature
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.formats: dict[str, str] = {}  # by matrix
        self.values = 0  # whose names end in their number
        self.file: BinaryIO  # of weights, while the graph is written

    def _norm(self, name: str, norm: Norm | None) -> FusedNorm:
        if norm is None:
            return NO_NORM
        inputs = [self._vector(f"{name}.gain", norm.gain), self._optional(f"{name}.bias", norm.bias)]
        return inputs, {"norm": norm.kind, "epsilon": norm.epsilon}

    def _standard_norm(self, x: str, name: str, norm: Norm) -> str:
        gain = self._vector(f"{name}.gain", norm.gain)
        if norm.gain.dim() == 2:  # layer norms of heads
            heads, size = norm.gain.shape
            apart = self._standard("Reshape", x, self._integers(0, heads, size))
            ones = self._vector(f"ones.{size}", np.ones(size, np.float32))
            y = self._standard("LayerNormalization", apart, ones, axis=-1, epsilon=norm.epsilon)
            y = self._standard("Mul", y, gain)
            y = y if norm.bias is None else self._standard("Add", y, self._vector(f"{name}.bias", norm.bias))
            return self._standard("Reshape", y, self._integers(0, heads * size))
        if norm.kind == "rms":
            return self._standard("RMSNormalization", x, gain, axis=-1, epsilon=norm.epsilon)
        bias = [self._vector(f"{name}.bias", norm.bias)] if norm.bias is not None else []
        return self._standard("LayerNormalization", x, gain, *bias, axis=-1, epsilon=norm.epsilon)

    def _add(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        node = helper.make_node(kind, inputs, outputs, name=outputs[0], domain=DOMAIN)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)

    def _standard(self, kind: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        output = to or self._value(kind.lower())
        self._several(kind, inputs, [output], **attributes)
        return output

    def _several(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        node = helper.make_node(kind, inputs, outputs)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)

    def _value(self, name: str) -> str:
        self.values += 1
        return f"{name}.{self.values}"

    def _integers(self, *values: int) -> str:
        name = f"integers.{'.'.join(map(str, values))}"
        return self._constant(name, np.array(values, np.int64))

    def _scalar(self, value: int) -> str:
        return self._constant(f"integer.{value}", np.array(value, np.int64))

    def _number(self, value: float) -> str:
        return self._vector(f"number.{value}", np.float32(value))

    def _optional(self, name: str, values: Tensor | None) -> str:
        return "" if values is None else self._vector(name, values)

    def _vector(self, name: str, values: Tensor | NDArray[np.float32] | np.float32) -> str:
        array = values.detach().float().numpy() if isinstance(values, Tensor) else values
        return self._constant(name, np.ascontiguousarray(array, np.float32))

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(values, name)
        return name

    def _matrix(self, name: str, *matrices: Matrix) -> str:
        """A constant in the file of weights: a matrix, or one for each expert."""
        self.file.write(bytes(-self.file.tell() % _ALIGNMENT))
        begin, matrix = self.file.tell(), matrices[0]
        for part in (part for each in matrices for part in each.packed()):
            self.file.write(part.tobytes())
        length = self.file.tell() - begin
        assert length == matrix.bytes * len(matrices)
        dims = [length] if len(matrices) == 1 else [len(matrices), matrix.bytes]
        tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", DATA_FILE), ("offset", begin), ("length", length)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        self.initializers[name] = tensor
        self.formats[name] = matrix.format.name
        return name

    def _write_model(self) -> None:
        """Write the graph, whose weights are in their file."""

        def infos(tensors: Sequence[SignatureTensor]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(t.name, DTYPES[t.dtype].onnx, t.shape) for t in tensors]

        inputs, outputs = (infos(tensors) for tensors in (self.signature.inputs, self.signature.outputs))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        add_functions(model)
        (self.folder / MODEL_FILE).write_bytes(model.SerializeToString())
