"""Append bundle: one or two attention layers and nothing else, which TensorRT builds in a moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tokenizers import Tokenizer, models

from spaceport.exporter.bundle_files import write_manifest
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE, TOKENIZER_FILE, Manifest, TokenIds
from spaceport.graphs.contract.signature import Precision, Signature, Tensor

VOCAB = 50
POSITIONS = 1024
TYPES = {"float32": 1, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


@dataclass(frozen=True)
class Attending:
    """Sizes and type of the layers."""

    dtype: Precision = "float16"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 1
    softcap: float = 0.0
    scale: float | None = None

    @property
    def signature(self) -> Signature:
        return Signature(self.layers, self.kv_heads, self.head_dim, VOCAB, self.dtype, "append")

    def model(self, seed: int = 5) -> onnx.ModelProto:
        """A graph with the contract's inputs and outputs and random weights."""
        dice, width = np.random.default_rng(seed), self.heads * self.head_dim
        kind, signature = TYPES[self.dtype], self.signature
        nodes: list[onnx.NodeProto] = []
        weights: list[onnx.TensorProto] = []

        def weight(name: str, *shape: int) -> str:
            values = dice.standard_normal(shape) * 0.5
            weights.append(numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(kind)), name))
            return name

        def whole(name: str, *numbers: int) -> str:
            weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
            return name

        def put(operator: str, output: str, *inputs: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
            return output

        def by_head(states: str, heads: int, label: str) -> str:
            split = put(
                "Reshape", f"{label}_split", states, whole(f"{label}_shape", 0, 0, heads, self.head_dim)
            )  # B x T x H x D
            return put("Transpose", label, split, perm=[0, 2, 1, 3])

        tokens = put("Gather", "tokens", weight("embedding", VOCAB, width), "input_ids")
        embedded = put("Gather", "position_embeddings", weight("positions", POSITIONS, width), "position_ids")
        states = put("Add", "states", tokens, embedded)
        weights.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
        start = put("Gather", "start", "slot_ids", "first", axis=1)
        visible = put("Shape", "visible", "attention_mask", start=3, end=4)
        axis, zero = whole("axis", 2), whole("zero", 0)
        for layer in range(self.layers):
            seen = []
            for name in ("key", "value"):
                past, present, label = f"past_key_values.{layer}.{name}", f"present.{layer}.{name}", f"{name}{layer}"
                made = put("MatMul", f"{label}_made", states, weight(f"w{label}", width, self.kv_heads * self.head_dim))
                rows = by_head(made, self.kv_heads, label)
                put("TensorScatter", present, past, rows, start, axis=-2, mode="linear")
                seen.append(put("Slice", f"{label}_seen", present, zero, visible, axis))
            query = by_head(
                put("MatMul", f"q{layer}", states, weight(f"wq{layer}", width, width)), self.heads, f"query{layer}"
            )
            limits: dict[str, Any] = {"softcap": self.softcap} if self.softcap else {}
            if self.scale is not None:
                limits["scale"] = self.scale
            heads = put("Attention", f"attention{layer}", query, *seen, "attention_mask", **limits)
            joined = put("Transpose", f"joined{layer}", heads, perm=[0, 2, 1, 3])
            flat = put("Reshape", f"flat{layer}", joined, whole(f"width{layer}", 0, 0, width))
            states = put("Add", f"states{layer}", states, flat)
        indices = put("Unsqueeze", "indices", "logit_rows", whole("last", -1))
        wanted = put("GatherND", "wanted", states, indices, batch_dims=1)
        put("Cast", "logits", put("MatMul", "scores", wanted, weight("head", width, VOCAB)), to=1)
        graph = helper.make_graph(
            nodes, "attending", [_value(t) for t in signature.inputs], [_value(t) for t in signature.outputs], weights
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)

    def write(self, folder: Path, seed: int = 5) -> Manifest:
        """Write the bundle to a new folder."""
        folder.mkdir()
        external: dict[str, Any] = {"save_as_external_data": True, "location": DATA_FILE, "size_threshold": 256}
        onnx.save(self.model(seed), str(folder / MODEL_FILE), **external)
        (folder / TOKENIZER_FILE).write_text(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str())
        return write_manifest(
            folder,
            Manifest(
                signature=self.signature,
                tokens=TokenIds(mask=(4,), end=(1,)),
                max_mask_slots=2,
                max_positions=POSITIONS,
                model_type="attending",
                parameters=1,
                opset=24,
                attention="operator",
            ),
        )


def _value(tensor: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, TYPES[tensor.dtype], list(tensor.shape))
