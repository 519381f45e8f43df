"""Write a model as a graph of native operators: five nodes for a layer, with function bodies of standard operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from onnx import TensorProto
from torch import Tensor, nn

from spaceport.exporter.graph_writer import NO_NORM, GraphWriter
from spaceport.exporter.native_weights import MOST_OTHERS, Weights, other_rows, rounded
from spaceport.graphs.contract.manifest import DATA_FILE
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import layer_output_name
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.heads import DraftHeads
from spaceport.graphs.parts import DecoderParts, Experts, LayerParts, Norm


class NativeGraph(GraphWriter):
    """The graph of a model."""

    def __init__(
        self,
        folder: Path,
        parts: DecoderParts,
        signature: Signature,
        weights: Weights,
        input_rows: tuple[tuple[int, ...], Tensor] | None = None,
        heads: DraftHeads | None = None,
    ) -> None:
        super().__init__(folder, signature, weights)
        self.parts, self.input_rows, self.heads = parts, input_rows, heads
        self.merged = 0  # weights of an input embedding that were not written, since the output embedding has them

    def write(self) -> None:
        """Write the graph, and its weights in the file beside it."""
        with (self.folder / DATA_FILE).open("wb") as self.file:
            self._nodes()
        self._write_model()

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
