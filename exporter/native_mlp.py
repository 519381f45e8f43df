"""Products with their adapters, MLPs and mixtures of experts in a graph of native operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from spaceport.exporter.graph_writer import NO_NORM, FusedNorm, GraphWriter
from spaceport.exporter.native_weights import Matrix, Weights, gate_matrix, padded_width, rounded, stacked
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.parts import BLOCK, Experts, Linear, Mlp, Norm
from spaceport.kernels.functions import SMALLEST

_RANK_MULTIPLE = 32


class MlpWriter(GraphWriter):
    """A graph to which products and MLPs are added."""

    def __init__(self, folder: Path, signature: Signature, weights: Weights) -> None:
        super().__init__(folder, signature)
        self.weights = weights
        self.adapted = ""  # the indices of the rows on which adapters act

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
        return self._product(name, x, inputs, widths, formats, norm, activation, rank)

    def _product(
        self,
        name: str,
        x: str,
        weights: Sequence[str],
        widths: Sequence[int],
        formats: str,
        norm: FusedNorm = NO_NORM,
        activation: str = "none",
        rank: int = 0,
    ) -> str:
        inputs, attributes = norm
        self._add(
            "NormProduct",
            [x, *inputs, *weights],
            [name],
            widths=widths,
            formats=formats,
            activation=activation,
            rank=rank,
            **attributes,
        )
        return name

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
        return torch.stack([half.reshape(-1, 16, *half.shape[1:]) for half in halves], 1).flatten(0, 2)

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
        self,
        name: str,
        x: str,
        weights: Sequence[str],
        matrix: Matrix,
        activation: str,
        norm: FusedNorm = NO_NORM,
        rank: int = 0,
    ) -> str:
        inputs, attributes = norm
        self._add(
            "GateProduct",
            [x, *inputs, *weights],
            [name],
            format=matrix.format.name,
            width=matrix.outputs // 2,
            activation=activation,
            rank=rank,
            **attributes,
        )
        return name

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
        logits = self._product(f"{name}.router", both, [weights], [matrix.outputs], matrix.format.name)
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
        gated = self._gate_product(f"{name}.experts.gated", own, [weights[0]], gate_up[0], experts.activation)
        product = self._product(f"{name}.experts.product", gated, [weights[1]], [down[0].outputs], down[0].format.name)
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
