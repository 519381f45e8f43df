"""Write a model as a graph of native operators: five nodes for a layer, with function bodies of standard operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from spaceport.exporter.native_weights import (
    MOST_OTHERS,
    Matrix,
    Weights,
    gate_matrix,
    other_rows,
    padded_width,
    rounded,
    stacked,
)
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature
from spaceport.graphs.contract.signature import Tensor as SignatureTensor
from spaceport.graphs.decoder import layer_output_name
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.heads import DraftHeads
from spaceport.graphs.parts import BLOCK, DecoderParts, Experts, LayerParts, Linear, Mlp, Norm
from spaceport.kernels.functions import SMALLEST, add_functions
from spaceport.kernels.native_library import DOMAIN, VERSION
from spaceport.kernels.packing import gate_order

OPSET, _IR_VERSION = 23, 11
_RANK_MULTIPLE = 32
_ALIGNMENT = 4096  # of weights in their file, so that they are mapped

FusedNorm = tuple[list[str], dict[str, Any]]  # inputs and attributes of a norm that is part of a product
NO_NORM: FusedNorm = (["", ""], {"norm": "none", "epsilon": 0.0})


class NativeGraph:
    """The graph of a model and, in the file beside it, its weights; methods that add nodes return the names of their outputs."""

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
        self.values = 0  # whose names end in their number
        self.adapted = ""  # the indices of the rows on which adapters act
        self.merged = 0  # weights of an input embedding that were not written, since the output embedding has them
        self.file: BinaryIO  # of weights, while the graph is written

    # Nodes and constants

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
        self._several(kind, inputs, outputs, **attributes)
        self.nodes[-1].name, self.nodes[-1].domain = outputs[0], DOMAIN

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

    # Products with their adapters, MLPs and mixtures of experts

    def _norm_product(
        self, name: str, x: str, linears: Sequence[Linear], norm: FusedNorm = NO_NORM, activation: str = "none"
    ) -> str:
        matrices = [self.weights.linear(linear) for linear in linears]
        inputs = []
        for number, (linear, matrix) in enumerate(zip(linears, matrices, strict=True)):
            inputs += [self._matrix(f"{name}.{number}", matrix), self._optional(f"{name}.{number}.bias", linear.bias)]
        rank, adapter = self._adapter(name, linears, None)
        inputs += [""] * (6 - len(inputs)) + adapter
        widths = [matrix.outputs for matrix in matrices]
        formats = ",".join(matrix.format.name for matrix in matrices)
        products = {"widths": widths, "formats": formats, "activation": activation, "rank": rank}
        return self._fused("NormProduct", name, x, inputs, norm, **products)

    def _fused(self, kind: str, name: str, x: str, weights: Sequence[str], norm: FusedNorm, **attributes: Any) -> str:
        """A node whose products have the norm of their input."""
        inputs, of_norm = norm
        self._add(kind, [x, *inputs, *weights], [name], **attributes, **of_norm)
        return name

    def _plain_product(self, name: str, x: str, weights: Sequence[str], outputs: int, form: str) -> str:
        one = {"widths": [outputs], "formats": form}
        return self._fused("NormProduct", name, x, weights, NO_NORM, **one, activation="none", rank=0)

    def _add_product(self, name: str, x: str, residual: str, linear: Linear, norm: Norm | None) -> str:
        """The residual plus a product, which may have a norm of its own."""
        matrix = self.weights.linear(linear)
        if norm is not None:
            product = self._norm_product(f"{name}.product", x, [linear])
            return self._standard("Add", residual, self._standard_norm(product, f"{name}.norm", norm), to=name)
        rank, adapter = self._adapter(name, [linear], None)
        bias = self._optional(f"{name}.bias", linear.bias)
        inputs = [x, residual, self._matrix(f"{name}.weights", matrix), bias, *adapter]
        self._add("AddProduct", inputs, [name], format=matrix.format.name, width=matrix.outputs, rank=rank)
        return name

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

    @staticmethod
    def _gate_order(values: Tensor) -> Tensor:
        """Values of a gate and of up below it (first axis), in the order of GateProduct."""
        width = len(values) // 2
        padding = [0, 0] * (values.dim() - 1) + [0, padded_width(width) - width]
        halves = [torch.nn.functional.pad(half, padding) for half in values.chunk(2)]
        return torch.cat(halves)[gate_order(padded_width(width))]

    def _mlp(self, name: str, x: str, mlp: Mlp, norm: FusedNorm = NO_NORM) -> str:
        """What the MLP has before its last product."""
        if not mlp.gated:
            return self._norm_product(name, x, mlp.up, norm, mlp.activation)
        matrices = [self.weights.linear(linear) for linear in mlp.up]
        if len({matrix.format.name for matrix in matrices}) > 1:
            states = [
                self._norm_product(f"{name}.{part}", x, [linear], norm, activation)
                for part, linear, activation in zip(("gate", "up"), mlp.up, (mlp.activation, "none"), strict=True)
            ]
            product, width = self._standard("Mul", *states), matrices[0].outputs
            padding = padded_width(width) - width
            return self._standard("Pad", product, self._integers(0, 0, 0, padding)) if padding else product
        both = gate_matrix(stacked(matrices))
        biases = [linear.bias for linear in mlp.up]
        bias = None
        if biases[0] is not None:
            bias = self._gate_order(torch.cat([each for each in biases if each is not None]))
        rank, adapter = self._adapter(name, mlp.up, self._gate_order)
        inputs = [self._matrix(f"{name}.gate_up", both), self._optional(f"{name}.bias", bias), *adapter]
        return self._gate_product(name, x, inputs, both, mlp.activation, norm, rank)

    def _gate_product(
        self, name: str, x: str, weights: Sequence[str], matrix: Matrix, activation: str, norm: FusedNorm, rank: int
    ) -> str:
        one = {"format": matrix.format.name, "width": matrix.outputs // 2, "activation": activation, "rank": rank}
        return self._fused("GateProduct", name, x, weights, norm, **one)

    def _experts(self, name: str, x: str, residual: str, experts: Experts, output: str) -> str:
        """The residual plus what the chosen experts of each row add, in the order of experts."""
        start = residual
        if experts.shared is not None and experts.shared_share is not None:
            start = self._standard("Add", residual, self._shared_expert(name, x, experts.shared, experts.shared_share))
        shares, chosen = self._routed(name, x, experts)
        used = self._value(f"{name}.used")
        self._several("Unique", [self._standard("Reshape", chosen, self._integers(-1))], [used], sorted=1)
        count = self._standard("Squeeze", self._standard("Shape", used))
        body = self._expert_body(name, experts, used, shares, chosen, x)
        self._several("Loop", [count, "", start], [output], body=body)
        return output

    def _routed(self, name: str, x: str, experts: Experts) -> tuple[str, str]:
        """The shares and indices of the experts of each row: rows x chosen experts.

        The input and the weights are split into what 8 bits hold and the rest: rounded to 8 bits, many rows would choose
        other experts."""
        blocks = self._standard("Reshape", x, self._integers(0, -1, BLOCK))
        top = self._standard("ReduceMax", self._standard("Abs", blocks), self._integers(-1), keepdims=1)
        step = self._standard("Max", self._standard("Div", top, self._number(127)), self._number(SMALLEST))
        high = self._standard("Mul", self._standard("Round", self._standard("Div", blocks, step)), step)
        low = self._standard("Sub", blocks, high)
        flat = [self._standard("Reshape", part, self._integers(0, -1)) for part in (high, low)]
        weight = experts.router
        rest = weight - torch.from_numpy(rounded(weight, "int8").read(np.arange(len(weight))).dequantized())
        matrix = rounded(torch.cat([weight, weight, rest], 1), "int8")
        both = self._standard("Concat", *flat, flat[0], axis=1)
        weights = self._matrix(f"{name}.router.weights", matrix)
        logits = self._plain_product(f"{name}.router", both, [weights], matrix.outputs, matrix.format.name)
        if not experts.normalized:
            logits = self._standard("Softmax", logits, axis=-1)
        shares, chosen = self._value(f"{name}.shares"), self._value(f"{name}.chosen")
        self._several("TopK", [logits, self._integers(experts.chosen)], [shares, chosen], axis=-1)
        return self._standard("Softmax", shares, axis=-1) if experts.normalized else shares, chosen

    def _shared_expert(self, name: str, x: str, mlp: Mlp, share: Linear) -> str:
        states = self._mlp(f"{name}.shared.up", x, mlp)
        product = self._norm_product(f"{name}.shared.down", states, [mlp.down])
        logit = self._norm_product(f"{name}.shared.share", x, [share])
        # the logistic function, but of whole rows
        both = self._standard("Softmax", self._standard("Pad", logit, self._integers(0, 0, 0, 1)), axis=-1)
        return self._standard("Mul", product, self._standard("Slice", both, *map(self._integers, (0, 1, 1))))

    def _expert_body(self, name: str, experts: Experts, used: str, shares: str, chosen: str, x: str) -> onnx.GraphProto:
        """Adds what one expert gives to the rows that chose it: there is at least one."""
        gates, downs = experts.weights("gate_up_proj"), experts.weights("down_proj")
        gate_up = [gate_matrix(rounded(each, self.weights.format_name)) for each in gates]
        down = [rounded(each, self.weights.format_name) for each in downs]
        stacks = [
            self._matrix(f"{name}.experts.{part}", *each) for part, each in (("gate_up", gate_up), ("down", down))
        ]
        outer, self.nodes = self.nodes, []
        expert = self._standard("Gather", used, f"{name}.turn")
        places = self._standard("NonZero", self._standard("Equal", chosen, expert))
        rows = self._standard("Gather", places, self._scalar(0))
        weights = [self._standard("Gather", stack, expert) for stack in stacks]
        own = self._standard("Gather", x, rows)
        gated = self._gate_product(
            f"{name}.experts.gated", own, [weights[0]], gate_up[0], experts.activation, NO_NORM, 0
        )
        product = self._plain_product(
            f"{name}.experts.product", gated, [weights[1]], down[0].outputs, down[0].format.name
        )
        share = self._standard("GatherND", shares, self._standard("Transpose", places))
        product = self._standard("Mul", product, self._standard("Unsqueeze", share, self._integers(1)))
        index, before, after = self._standard("Unsqueeze", rows, self._integers(1)), f"{name}.before", f"{name}.after"
        self._standard("ScatterND", before, index, product, to=after, reduction="add")
        going = [self._standard("Identity", f"{name}.going", to=f"{name}.goes_on")]
        body, self.nodes = self.nodes, outer
        info, width = helper.make_tensor_value_info, downs.shape[1]
        inputs = [info(f"{name}.turn", TensorProto.INT64, []), info(f"{name}.going", TensorProto.BOOL, [])]
        outputs = [info(each, TensorProto.BOOL, []) for each in going]
        states = [info(each, TensorProto.FLOAT, [None, width]) for each in (before, after)]
        return helper.make_graph(body, f"{name}.expert", [*inputs, states[0]], [*outputs, states[1]])

    # Before and after the layers

    def _own_rows(self, shared: bool) -> dict[int, Tensor]:
        """Input embeddings by token that are not in the table, or rounded although no file has them in few bits."""
        tokens = {*self.weights.changed, *((other_rows(self.parts) if shared else None) or ())}
        rows = {token: self.parts.embedding.weight[token] for token in sorted(tokens) if len(tokens) <= MOST_OTHERS}
        return rows | ({} if self.input_rows is None else dict(zip(*self.input_rows, strict=True)))

    def _replaced_rows(self, x: str, rows: dict[int, Tensor]) -> str:
        """The embeddings, of some tokens replaced by rows of their own."""
        if not rows:
            return x
        ids = self._standard("Reshape", "input_ids", self._integers(-1, 1))
        for token, row in rows.items():
            own = self._vector(f"input_rows.{token}", row[None] * self.parts.embedding_scale)
            x = self._standard("Where", self._standard("Equal", ids, self._integers(token)), own, x)
        return x

    def _rotations(self) -> None:
        """The cosines and sines of all rows: rows x pairs."""
        column = self._standard("Reshape", "position_ids", self._integers(-1, 1))
        positions = "positions"
        self._several("Cast", [column], [positions], to=TensorProto.FLOAT)
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
        numbers = self._standard("Range", self._scalar(0), scalar, self._scalar(1))
        every = self._standard("Unsqueeze", numbers, self._integers(0))  # as the rows of one request
        lines = [self._line(rows, every, head, bias, {**common, "cap": parts.cap})]
        for index, block in enumerate(self.heads.children()):
            *residual, last = cast(Sequence[Any], tuple(block.children()))
            states = rows
            for number, each in enumerate(residual):
                states = self._residual_block(f"heads.{index}.{number}", states, each.linear)
            own = self._matrix(f"heads.{index}.output", rounded(last.weight, "int8"))
            lines.append(self._line(states, every, own, "", {**common, "format": "int8", "cap": 0.0}))
        apart = [self._standard("Unsqueeze", line, self._integers(2)) for line in lines]
        requests = self._standard("Shape", "logit_rows", start=0, end=1)
        shape = self._standard("Concat", requests, self._integers(-1, vocabulary), axis=0)
        self._standard("Reshape", self._standard("Concat", *apart, axis=2), shape, to="logits")

    def _chosen_rows(self, x: str) -> str:
        width = self.parts.head.module.in_features
        requests = self._standard("Shape", "logit_rows", start=0, end=1)
        shape = self._standard("Concat", requests, self._integers(-1, width), axis=0)
        places = self._standard("Unsqueeze", "logit_rows", self._integers(2))
        chosen = self._standard("GatherND", self._standard("Reshape", x, shape), places, batch_dims=1)
        return self._standard("Reshape", chosen, self._integers(-1, width))

    def _line(self, rows: str, every: str, matrix: str, bias: str, attributes: dict[str, Any]) -> str:
        output = self._value("line")
        self._add("Head", [rows, every, "", "", matrix, bias], [output], norm="none", epsilon=0.0, **attributes)
        return output

    def _residual_block(self, name: str, states: str, linear: nn.Linear) -> str:
        inputs = [self._matrix(name, rounded(linear.weight, "int8")), self._optional(f"{name}.bias", linear.bias)]
        one = {"widths": [linear.out_features], "formats": "int8", "activation": "silu", "rank": 0}
        product = self._fused("NormProduct", f"{name}.product", states, inputs, NO_NORM, **one)
        return self._standard("Add", states, product)

    # A layer

    def _layer(self, index: int, layer: LayerParts, x: str) -> str:
        name, signature, parts = f"layers.{index}", self.signature, self.parts
        norm = self._norm(f"{name}.attention_norm", layer.attention_norm)
        qkv = self._norm_product(f"{name}.qkv", x, layer.qkv, norm)
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
        output = layer_output_name(index)
        if isinstance(layer.mlp, Experts):
            if layer.mlp_norm is not None:
                source = self._standard_norm(source, f"{name}.mlp_norm", layer.mlp_norm)
            return self._experts(name, source, middle, layer.mlp, output)
        states = self._mlp(f"{name}.up", source, layer.mlp, self._norm(f"{name}.mlp_norm", layer.mlp_norm))
        return self._add_product(output, states, middle, layer.mlp.down, layer.after_mlp)

    def _row_norms(self, name: str, qkv: str, norms: tuple[Norm, Norm], sizes: list[int]) -> str:
        q, k, v = (self._value(f"{name}.{part}") for part in "qkv")
        self._several("Split", [qkv, self._integers(*sizes)], [q, k, v], axis=1)
        q, k = (
            self._standard_norm(value, f"{name}.{part}_norm", norm)
            for value, part, norm in zip((q, k), "qk", norms, strict=True)
        )
        return self._standard("Concat", q, k, v, axis=1)

    # The whole graph

    def _nodes(self) -> None:
        parts = self.parts
        shared = self.weights.one_table(parts)
        if shared and not parts.tied:
            self.merged = parts.embedding.weight.numel()
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
        x = self._replaced_rows("embedded", self._own_rows(shared))
        self._rotations()
        self._adapted_rows()
        for index, layer in enumerate(parts.layers):
            x = self._layer(index, layer, x)
        head = embedding
        if not shared:
            head = self._matrix("head", self.weights.table(parts.head.module.weight, output=True))
        self._logits(x, head)

    def _write_model(self) -> None:
        def infos(tensors: Sequence[SignatureTensor]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(t.name, DTYPES[t.dtype].onnx, t.shape) for t in tensors]

        inputs, outputs = (infos(tensors) for tensors in (self.signature.inputs, self.signature.outputs))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        add_functions(model)
        (self.folder / MODEL_FILE).write_bytes(model.SerializeToString())

    def write(self) -> None:
        """Write the graph, and its weights in the file beside it."""
        with (self.folder / DATA_FILE).open("wb") as self.file:
            self._nodes()
        self._write_model()
