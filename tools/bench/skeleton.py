"""Skeletons: bundles of random models of any size without their weights, a few hundred kilobytes for billions of them.

The exported checkpoint has the real layers and heads, but a small hidden and feed-forward size: its operators are those of
the real model, and only the sizes of its weights are replaced.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForCausalLM, LlamaConfig

from spaceport.exporter.atomic_folder import writing
from spaceport.exporter.checkpoint import TokenFlags, quiet_libraries
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import DATA_FILE, MANIFEST_FILE, MODEL_FILE, manifest_content, manifest_in
from spaceport.graphs.contract.signature import DTYPES, Precision
from spaceport.graphs.decoder import AttentionImplementation
from spaceport.tools.bench.random_weights import ALIGNED, CONFIG_FILE, SKELETON_FILE
from spaceport.tools.demo.prompts import MODEL

_HIDDEN, _INNER = 160, 352  # sizes while exporting, unlike any other size of the graph
_VOCABULARY, _POSITIONS = 32000, 8192


class Shape(NamedTuple):
    """The sizes of a Llama."""

    hidden: int
    inner: int  # of the feed-forward networks
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "tiny": Shape(256, 512, 4, 4, 2),
    "1b": Shape(2048, 5632, 22, 32, 8),
    "7b": Shape(4096, 11008, 32, 32, 32),
    "8b": Shape(4096, 14336, 32, 32, 8),
}


def write_skeleton(name: str, target: Path, dtype: Precision, attention: AttentionImplementation) -> int:
    """Write the skeleton of a random Llama of this name; returns its number of weights."""
    if name not in SHAPES:
        raise OptionFault(f"shape is {name!r}: expected one of {', '.join(SHAPES)}")
    shape = SHAPES[name]
    quiet_libraries()
    with tempfile.TemporaryDirectory() as scratch, writing(target, overwrite=False) as unfinished:
        checkpoint, bundle = Path(scratch) / "checkpoint", Path(scratch) / "bundle"
        config = _config(shape._replace(hidden=_HIDDEN, inner=_INNER), shape.hidden // shape.heads)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(checkpoint)
        copy(MODEL / "tokenizer.json", checkpoint)
        tokens = TokenFlags(mask=(str(_VOCABULARY - 1),))
        export(checkpoint, bundle, ExportOptions(FORMATS[dtype], attention=attention, tokens=tokens))
        model = onnx.load(str(bundle / MODEL_FILE))
        weights, end = _resize(model, shape, dtype)
        (unfinished / MODEL_FILE).write_bytes(model.SerializeToString())
        for file in bundle.iterdir():
            if file.name not in (MODEL_FILE, DATA_FILE, MANIFEST_FILE):
                copy(file, unfinished)
        manifest = replace(manifest_in((bundle / MANIFEST_FILE).read_bytes()), parameters=weights, files={})
        (unfinished / MANIFEST_FILE).write_bytes(manifest_content(manifest))
        (unfinished / SKELETON_FILE).write_text(json.dumps({"bytes": end}))
        _config(shape, shape.hidden // shape.heads).to_json_file(unfinished / CONFIG_FILE)
    return weights


def _config(shape: Shape, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def _resize(model: onnx.ModelProto, shape: Shape, dtype: Precision) -> tuple[int, int]:
    """Give the weights of a graph their real sizes; returns their number, and the bytes of their data file.

    Weights of one shape share a part of the file: an engine copies each of them to its device, so that steps read as many
    bytes as those of a model whose layers differ.
    """
    sizes = {_HIDDEN: shape.hidden, _INNER: shape.inner, 2 * _INNER: 2 * shape.inner}
    places: dict[tuple[int, ...], int] = {}
    weights, end = 0, 0
    for tensor in model.graph.initializer:
        dims = tuple(sizes.get(size, size) for size in tensor.dims)
        if tensor.data_type == DTYPES[dtype].onnx and len(dims) == 2:
            count = math.prod(dims)
            weights += count
            if dims not in places:
                places[dims], end = end, -(-(end + count * DTYPES[dtype].bytes) // ALIGNED) * ALIGNED
            resized = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=dims)
            resized.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", DATA_FILE),
                ("offset", places[dims]),
                ("length", count * DTYPES[dtype].bytes),
            ):
                resized.external_data.add(key=key, value=str(value))
            tensor.CopyFrom(resized)
        elif list(tensor.dims) == [_HIDDEN]:  # a norm, whose weights are all 1
            one = numpy_helper.to_array(tensor)[:1]
            tensor.CopyFrom(numpy_helper.from_array(one.repeat(shape.hidden), tensor.name))
        elif tensor.data_type == TensorProto.INT64:  # sizes of splits and reshapes
            values = numpy_helper.to_array(tensor)
            resized_values = np.array([sizes.get(value, value) for value in values.ravel().tolist()], np.int64)
            tensor.CopyFrom(numpy_helper.from_array(resized_values.reshape(values.shape), tensor.name))
    del model.graph.value_info[:]  # sizes of the small model
    return weights, end
