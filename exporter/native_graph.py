"""Write a model as a graph of native operators: five nodes for a layer, with function bodies of standard operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from spaceport.exporter.native_weights import Matrix, Weights, gate_matrix, padded_width, rounded, stacked
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature
from spaceport.graphs.contract.signature import Tensor as SignatureTensor
from spaceport.graphs.decoder import layer_output_name
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.heads import DraftHeads
from spaceport.graphs.parts import BLOCK, DecoderParts, LayerParts, Linear, Norm
from spaceport.kernels.functions import add_functions
from spaceport.kernels.native_library import DOMAIN

OPSET, _IR_VERSION = 23, 11
_ALIGNMENT = 4096  # of weights in their file, so that they are mapped
_RANK_MULTIPLE = 32


class NativeGraph:
    """The graph of a model and, in the file beside it, its weights."""

    def __init__(
        self,
        folder: Path,
        parts: DecoderParts,
        signature: Signature,
        weights: Weights,
        input_rows: tuple[tuple[int, ...], Tensor] | None = None,
        heads: DraftHeads | None = None,
    ) -> None:
        self.folder, self.parts, self.signature, self.weights = folder, parts, signature, weights
        self.input_rows, self.heads = input_rows, heads
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.formats: dict[str, str] = {}  # by matrix

    def write(self) -> None:
        """Write both files."""
        with (self.folder / DATA_FILE).open("wb") as self.file:
            self._nodes()
        model = self._model()
        add_functions(model)
        (self.folder / MODEL_FILE).write_bytes(model.SerializeToString())

    def _nodes(self) -> None:
        parts = self.parts
        shared = self.weights.one_table(parts)
        weight = parts.head.module.weight if shared else parts.embedding.weight
        table = self.weights.table(weight, output=shared)
        embedding = self._matrix("embedding", table)
        self._add(
            "Embed",
            ["input_ids", embedding],
            ["embedded"],
            format=table.format.name,
            vocabulary=table.outputs,
            width=table.inputs,
            scale=parts.embedding_scale,
        )
        x = self._replaced_rows("embedded")
        self._rotations()
        self._adapted_rows()
        for index, layer in enumerate(parts.layers):
            x = self._layer(index, layer, x)
        head = embedding
        if not shared:
            head = self._matrix("head", self.weights.table(parts.head.module.weight, output=True))
        self._logits(x, head)

    # Before and after the layers

    def _replaced_rows(self, x: str) -> str:
        """The embeddings, of some tokens replaced by rows of their own."""
        if self.input_rows is None:
            return x
        ids = self._standard("Reshape", "input_ids", self._integers(-1, 1))
        tokens, rows = self.input_rows
        for token, row in zip(tokens, rows, strict=True):
            own = self._vector(f"input_rows.{token}", row[None] * self.parts.embedding_scale)
            x = self._standard("Where", self._standard("Equal", ids, self._integers(token)), own, x)
        return x

    def _rotations(self) -> None:
        """The cosines and sines of all rows: rows x pairs."""
        column = self._standard("Reshape", "position_ids", self._integers(-1, 1))
        positions = self._floats(column)
        self.turns: list[tuple[str, str]] = []
        for index, rotation in enumerate(self.parts.rotations):
            # Whole vectors, so that a row does not depend on its place: the last numbers of a tensor are computed alone.
            count = len(rotation.frequencies)
            padded = np.pad(rotation.frequencies.numpy(), (0, -count % 16))
            angles = self._standard("Mul", positions, self._vector(f"frequencies.{index}", padded))
            turn = []
            for kind in ("Cos", "Sin"):
                values = self._standard(kind, angles)
                if rotation.factor != 1:
                    values = self._standard(
                        "Mul", values, self._vector(f"turn_factor.{index}", np.float32(rotation.factor))
                    )
                if len(padded) > count:
                    values = self._standard("Slice", values, *(self._integers(each) for each in (0, count, 1)))
                turn.append(values)
            self.turns.append((turn[0], turn[1]))
        if any(layer.rotation is None for layer in self.parts.layers):
            zero, one = (self._vector(name, np.full((1, 1), value, np.float32)) for name, value in (("0", 0), ("1", 1)))
            still = self._standard("Mul", positions, zero)
            self.still = (self._standard("Add", still, one), still)

    def _adapted_rows(self) -> None:
        """The indices of the mask rows, on which adapters act."""
        gates = {
            linear.module.gate
            for layer in self.parts.layers
            for linear in layer.linears
            if isinstance(linear.module, GatedLinear)
        }
        self.adapted = ""
        for gate in gates:
            ids = self._standard("Reshape", "input_ids", self._integers(-1))
            found = [self._standard("Equal", ids, self._integers(token)) for token in gate.mask_ids]
            either = found[0]
            for each in found[1:]:
                either = self._standard("Or", either, each)
            self.adapted = self._standard("Reshape", self._standard("NonZero", either), self._integers(-1))

    def _logits(self, x: str, head: str) -> None:
        parts, vocabulary = self.parts, self.signature.vocab_size
        norm, attributes = self._norm("norm", parts.norm)
        bias = self._optional("head.bias", parts.head.bias)
        common = {"format": self.formats[head], "vocabulary": vocabulary}
        if self.heads is None:
            inputs = [x, "logit_rows", *norm, head, bias]
            self._add("Head", inputs, ["logits"], **common, cap=parts.cap, **attributes)
            return
        rows = self._standard_norm(self._chosen_rows(x), "norm", parts.norm)
        count = self._standard("Shape", rows, start=0, end=1)
        scalar = self._standard("Squeeze", count)
        every = self._standard("Range", self._scalar(0), scalar, self._scalar(1))
        lines = [self._line(rows, every, head, bias, {**common, "cap": parts.cap})]
        for index, block in enumerate(self.heads.children()):
            *residual, last = cast(Sequence[Any], tuple(block.children()))
            states = rows
            for number, each in enumerate(residual):
                states = self._residual_block(f"heads.{index}.{number}", states, each.linear)
            own = self._matrix(f"heads.{index}.output", rounded(last.weight, "int8"))
            lines.append(self._line(states, every, own, "", {**common, "format": "int8", "cap": 0.0}))
        apart = [self._standard("Unsqueeze", line, self._integers(1)) for line in lines]
        requests = self._standard("Shape", "logit_rows", start=0, end=1)
        shape = self._standard("Concat", requests, self._integers(-1, vocabulary), axis=0)
        self._standard("Reshape", self._standard("Concat", *apart, axis=1), shape, to="logits")

    def _chosen_rows(self, x: str) -> str:
        """The rows with logits, of all requests."""
        width = self.parts.head.module.in_features
        requests = self._standard("Shape", "logit_rows", start=0, end=1)
        shape = self._standard("Concat", requests, self._integers(-1, width), axis=0)
        places = self._standard("Unsqueeze", "logit_rows", self._integers(2))
        chosen = self._standard("GatherND", self._standard("Reshape", x, shape), places, batch_dims=1)
        return self._standard("Reshape", chosen, self._integers(-1, width))

    def _line(self, rows: str, every: str, matrix: str, bias: str, attributes: dict[str, Any]) -> str:
        """The logits of all these rows."""
        output = self._value("line")
        self._add("Head", [rows, every, "", "", matrix, bias], [output], norm="none", epsilon=0.0, **attributes)
        return output

    def _residual_block(self, name: str, states: str, linear: nn.Linear) -> str:
        inputs = [self._matrix(name, rounded(linear.weight, "int8")), self._optional(f"{name}.bias", linear.bias)]
        self._add(
            "NormProduct",
            [states, "", "", *inputs],
            [f"{name}.product"],
            widths=[linear.out_features],
            formats="int8",
            activation="silu",
            norm="none",
            epsilon=0.0,
            rank=0,
        )
        return self._standard("Add", states, f"{name}.product")

    # A layer

    def _layer(self, index: int, layer: LayerParts, x: str) -> str:
        name, signature, parts = f"layers.{index}", self.signature, self.parts
        norm, attributes = self._norm(f"{name}.attention_norm", layer.attention_norm)
        qkv = self._norm_product(f"{name}.qkv", x, layer.qkv, norm, attributes, "none")
        sizes = [parts.heads * parts.head_dim, *[parts.kv_heads * parts.head_dim] * 2]
        if layer.row_norms:
            qkv = self._row_norms(name, qkv, layer.row_norms, sizes)
        past, present = (
            [tensor.name for tensor in tensors[3 * index : 3 * index + 3]]
            for tensors in (signature.past, signature.present)
        )
        turn = self.still if layer.rotation is None else self.turns[layer.rotation]
        visible = "sliding_attention_mask" if layer.windowed else "attention_mask"
        gains = ["", ""]
        if layer.head_norms:
            gains = [
                self._vector(f"{name}.{part}_gain", norm.gain)
                for part, norm in zip("qk", layer.head_norms, strict=True)
            ]
        attended = self._value(f"{name}.attended")
        self._add(
            "Attend",
            [qkv, *turn, "slot_ids", visible, *past, *gains],
            [attended, *present],
            heads=parts.heads,
            interleaved=int(parts.interleaved),
            scale=layer.scale,
            cap=layer.cap,
            epsilon=layer.head_norms[0].epsilon if layer.head_norms else 0.0,
        )
        middle = self._add_product(f"{name}.attention", attended, x, layer.output, layer.after_attention)
        source = x if layer.parallel else middle
        norm, attributes = self._norm(f"{name}.mlp_norm", layer.mlp_norm)
        states = self._mlp(f"{name}.up", source, layer, norm, attributes)
        return self._add_product(layer_output_name(index), states, middle, layer.down, layer.after_mlp)

    def _norm_product(
        self, name: str, x: str, linears: Sequence[Linear], norm: list[str], attributes: dict[str, Any], activation: str
    ) -> str:
        matrices = [self.weights.linear(linear) for linear in linears]
        inputs = []
        for number, (linear, matrix) in enumerate(zip(linears, matrices, strict=True)):
            inputs += [self._matrix(f"{name}.{number}", matrix), self._optional(f"{name}.{number}.bias", linear.bias)]
        rank, adapter = self._adapter(name, linears, None)
        inputs += [""] * (6 - len(inputs)) + adapter
        self._add(
            "NormProduct",
            [x, *norm, *inputs],
            [name],
            widths=[matrix.outputs for matrix in matrices],
            formats=",".join(matrix.format.name for matrix in matrices),
            activation=activation,
            rank=rank,
            **attributes,
        )
        return name

    def _mlp(self, name: str, x: str, layer: LayerParts, norm: list[str], attributes: dict[str, Any]) -> str:
        """What the MLP has before its last product."""
        if not layer.gated:
            return self._norm_product(name, x, layer.up, norm, attributes, layer.activation)
        matrices = [self.weights.linear(linear) for linear in layer.up]
        if len({matrix.format.name for matrix in matrices}) > 1:
            states = [
                self._norm_product(f"{name}.{part}", x, [linear], norm, attributes, activation)
                for part, linear, activation in zip(("gate", "up"), layer.up, (layer.activation, "none"), strict=True)
            ]
            product, width = self._standard("Mul", *states), matrices[0].outputs
            padding = padded_width(width) - width
            return self._standard("Pad", product, self._integers(0, 0, 0, padding)) if padding else product
        both = gate_matrix(stacked(matrices))
        biases = [linear.bias for linear in layer.up]
        bias = None
        if biases[0] is not None:
            bias = self._gate_order(torch.cat([each for each in biases if each is not None]))
        rank, adapter = self._adapter(name, layer.up, self._gate_order)
        self._add(
            "GateProduct",
            [x, *norm, self._matrix(f"{name}.gate_up", both), self._optional(f"{name}.bias", bias), *adapter],
            [name],
            format=both.format.name,
            width=both.outputs // 2,
            activation=layer.activation,
            rank=rank,
            **attributes,
        )
        return name

    @staticmethod
    def _gate_order(values: Tensor) -> Tensor:
        """Values of a gate and of up below it (first axis), in the order of GateProduct."""
        width = len(values) // 2
        padding = [0, 0] * (values.dim() - 1) + [0, padded_width(width) - width]
        halves = [torch.nn.functional.pad(half, padding) for half in values.chunk(2)]
        return torch.stack([half.reshape(-1, 16, *half.shape[1:]) for half in halves], 1).flatten(0, 2)

    def _add_product(self, name: str, x: str, residual: str, linear: Linear, norm: Norm | None) -> str:
        """The residual plus a product, which may have a norm of its own."""
        matrix = self.weights.linear(linear)
        if norm is not None:
            product = self._norm_product(
                f"{name}.product", x, [linear], ["", ""], {"norm": "none", "epsilon": 0.0}, "none"
            )
            return self._standard("Add", residual, self._standard_norm(product, f"{name}.norm", norm), to=name)
        rank, adapter = self._adapter(name, [linear], None)
        bias = self._optional(f"{name}.bias", linear.bias)
        inputs = [x, residual, self._matrix(f"{name}.weights", matrix), bias, *adapter]
        self._add("AddProduct", inputs, [name], format=matrix.format.name, width=matrix.outputs, rank=rank)
        return name

    def _row_norms(self, name: str, qkv: str, norms: tuple[Norm, Norm], sizes: list[int]) -> str:
        q, k, v = (self._value(f"{name}.{part}") for part in "qkv")
        self.nodes.append(helper.make_node("Split", [qkv, self._integers(*sizes)], [q, k, v], axis=1))
        q, k = (
            self._standard_norm(value, f"{name}.{part}_norm", norm)
            for value, part, norm in zip((q, k), "qk", norms, strict=True)
        )
        return self._standard("Concat", q, k, v, axis=1)

    def _adapter(
        self, name: str, linears: Sequence[Linear], order: Callable[[Tensor], Tensor] | None
    ) -> tuple[int, list[str]]:
        """The rank of the adapters of linear modules together, and their inputs: down, and up, whose blocks are apart."""
        gated = [linear.module for linear in linears if isinstance(linear.module, GatedLinear)]
        if not gated:
            return 0, []
        rank = sum(len(module.A) for module in gated)
        padded = -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        inputs = -(-gated[0].in_features // BLOCK) * BLOCK
        down = torch.zeros(padded, inputs)
        up = torch.zeros(sum(linear.outputs for linear in linears), padded)
        row = column = 0
        for linear in linears:
            if isinstance(module := linear.module, GatedLinear):
                own = len(module.A)
                down[column : column + own, : module.in_features] = module.A.detach().float()
                product = linear.scaled(linear.ordered(module.B.detach().float() * module.scale))
                up[row : row + linear.outputs, column : column + own] = product
                column += own
            row += linear.outputs
        up = up if order is None else order(up)
        return padded, [
            self.adapted,
            self._matrix(f"{name}.down", rounded(down, "int8")),
            self._matrix(f"{name}.up", rounded(up, "int8")),
        ]

    # Nodes and constants

    def _norm(self, name: str, norm: Norm | None) -> tuple[list[str], dict[str, Any]]:
        """The inputs and attributes of a norm that is part of a product."""
        if norm is None:
            return ["", ""], {"norm": "none", "epsilon": 0.0}
        inputs = [self._vector(f"{name}.gain", norm.gain), self._optional(f"{name}.bias", norm.bias)]
        return inputs, {"norm": norm.kind, "epsilon": norm.epsilon}

    def _standard_norm(self, x: str, name: str, norm: Norm) -> str:
        gain = self._vector(f"{name}.gain", norm.gain)
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
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _floats(self, value: str) -> str:
        output = self._value("floats")
        self.nodes.append(helper.make_node("Cast", [value], [output], to=TensorProto.FLOAT))
        return output

    def _value(self, name: str) -> str:
        return f"{name}.{len(self.nodes)}"

    def _integers(self, *values: int) -> str:
        name = f"integers.{'.'.join(map(str, values))}"
        return self._constant(name, np.array(values, np.int64))

    def _scalar(self, value: int) -> str:
        return self._constant(f"integer.{value}", np.array(value, np.int64))

    def _optional(self, name: str, values: Tensor | None) -> str:
        return "" if values is None else self._vector(name, values)

    def _vector(self, name: str, values: Tensor | NDArray[np.float32] | np.float32) -> str:
        array = values.detach().float().numpy() if isinstance(values, Tensor) else values
        return self._constant(name, np.ascontiguousarray(array, np.float32))

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(values, name)
        return name

    def _matrix(self, name: str, matrix: Matrix) -> str:
        """A constant in the file of weights."""
        self.file.write(bytes(-self.file.tell() % _ALIGNMENT))
        begin = self.file.tell()
        for part in matrix.packed():
            self.file.write(part.tobytes())
        length = self.file.tell() - begin
        assert length == matrix.bytes
        tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[length], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", DATA_FILE), ("offset", begin), ("length", length)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        self.initializers[name] = tensor
        self.formats[name] = matrix.format.name
        return name

    def _model(self) -> onnx.ModelProto:
        def infos(tensors: Sequence[SignatureTensor]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(t.name, DTYPES[t.dtype].onnx, t.shape) for t in tensors]

        inputs, outputs = (infos(tensors) for tensors in (self.signature.inputs, self.signature.outputs))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
