"""Append bundle: one or two attention layers and nothing else, which TensorRT builds in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser
from tokenizers import Tokenizer, models

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE, TOKENIZER_FILE, Manifest, TokenIds
from spaceport.graphs.contract.signature import Precision, Signature, Tensor

VOCAB = 50
POSITIONS = 1024


def declared(tensors: Sequence[Tensor]) -> str:
    """Inputs or outputs in ONNX's text format."""
    kinds = {"float32": "float"}
    return ", ".join(
        f'{kinds.get(each.dtype, each.dtype)}[{",".join(map(str, each.shape))}] "{each.name}"' for each in tensors
    )


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
        signature, width, kv_width = self.signature, self.heads * self.head_dim, self.kv_heads * self.head_dim
        model = parser.parse_model(f"""<ir_version: 11, opset_import: ["": 24]>
            attending ({declared(signature.inputs)}) => ({declared(signature.outputs)})
            <int64 first = {{0}}, int64[1] zero = {{0}}, int64[1] axis = {{2}}, int64[1] last = {{-1}},
             int64[4] by_head = {{0, 0, {self.heads}, {self.head_dim}}}, int64[3] flat = {{0, 0, {width}}},
             int64[4] by_kv_head = {{0, 0, {self.kv_heads}, {self.head_dim}}}> {{
                tokens = Gather (embedding, input_ids)
                places = Gather (positions, position_ids)
                states0 = Add (tokens, places)
                start = Gather <axis = 1> (slot_ids, first)
                visible = Shape <start = 3, end = 4> (attention_mask)
                {"".join(map(self._layer, range(self.layers)))}
                indices = Unsqueeze (logit_rows, last)
                wanted = GatherND <batch_dims = 1> (states{self.layers}, indices)
                scores = MatMul (wanted, head)
                logits = Cast <to = 1> (scores)
            }}""")
        shapes = {"embedding": (VOCAB, width), "positions": (POSITIONS, width), "head": (width, VOCAB)}
        for layer in range(self.layers):
            shapes |= {f"wkey{layer}": (width, kv_width), f"wvalue{layer}": (width, kv_width)}
            shapes[f"wquery{layer}"] = (width, width)
        dice = np.random.default_rng(seed)
        kind = helper.tensor_dtype_to_np_dtype(model.graph.input[-1].type.tensor_type.elem_type)
        for name, shape in shapes.items():
            values = dice.standard_normal(shape) * 0.5
            model.graph.initializer.append(numpy_helper.from_array(values.astype(kind), name))
        return model

    def _layer(self, i: int) -> str:
        limits = [f"softcap: float = {self.softcap}"] * bool(self.softcap)
        limits += [f"scale: float = {self.scale}"] * (self.scale is not None)
        heads = "".join(
            f"""
                {name}{i}_made = MatMul (states{i}, w{name}{i})
                {name}{i}_split = Reshape ({name}{i}_made, {shape})
                {name}{i} = Transpose <perm = [0, 2, 1, 3]> ({name}{i}_split)"""
            for name, shape in (("query", "by_head"), ("key", "by_kv_head"), ("value", "by_kv_head"))
        )
        seen = "".join(
            f"""
                "present.{i}.{name}" = TensorScatter <axis = -2, mode = "linear">
                    ("past_key_values.{i}.{name}", {name}{i}, start)
                {name}{i}_seen = Slice ("present.{i}.{name}", zero, visible, axis)"""
            for name in ("key", "value")
        )
        return f"""{heads}{seen}
                [attention{i}] heads{i} = Attention {f"<{', '.join(limits)}>" if limits else ""}
                    (query{i}, key{i}_seen, value{i}_seen, attention_mask)
                joined{i} = Transpose <perm = [0, 2, 1, 3]> (heads{i})
                flat{i} = Reshape (joined{i}, flat)
                states{i + 1} = Add (states{i}, flat{i})"""

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
                drafts=DraftMethod(max_tokens=2),
                max_positions=POSITIONS,
                model_type="attending",
                parameters=1,
                opset=24,
                attention="operator",
                format=self.dtype,
            ),
        )
