"""Stored integers: the int8 weights in the graph of a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper
from torch import Tensor

from spaceport.exporter.integer_matmuls import ATTENTION, EMBEDDING, PLACES, Place, stored_scales
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding


def stored_integers(graph: bytes, folder: Path, limbs: int) -> IntegerModel:
    """The int8 layers and the int8 embedding of a graph; large constants are mapped from the files in its folder."""
    try:
        model = onnx.load_model_from_string(graph)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        places: dict[str, Place] = json.loads(metadata[PLACES])
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        found = {
            name: (_values(constants[codes], folder), _values(constants[scales], folder), start, end)
            for name, (codes, scales, start, end) in places.items()
        }
        codes, scales, _, _ = found.pop(EMBEDDING)
        attention = stored_scales(metadata[ATTENTION])
    except (DecodeError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputFault(
            f"{folder}: {type(error).__name__} {error} where the graph describes its int8 weights: expected one of this "
            "version of `spaceport export --weights int8`; export the checkpoint again"
        ) from error
    layers = {
        name: IntegerLinear(codes[:, start:end], scales[start:end])
        for name, (codes, scales, start, end) in found.items()
    }
    return IntegerModel(limbs, layers, QuantizedEmbedding(codes, scales[:, 0]), attention=attention)


def _values(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place:
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    dtype, offset = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), int(place.get("offset", 0))
    return torch.from_numpy(np.memmap(folder / place["location"], dtype, "c", offset, tuple(tensor.dims)))
