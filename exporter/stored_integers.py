"""Stored integers: the int8 and int4 weights in the graph of a bundle."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper
from torch import Tensor

from spaceport.exporter.integer_matmuls import ATTENTION, EMBEDDING, PLACES, Place, stored_scales
from spaceport.exporter.projections import JOINED
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding
from spaceport.graphs.weight_quantization import QuantizedWeight


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


def stored_int4(graph: bytes, folder: Path) -> dict[str, QuantizedWeight]:
    """The int4 weights of a graph, by the names of their modules."""
    try:
        model = onnx.load_model_from_string(graph)
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        joined = json.loads(metadata.get(JOINED, "{}"))
        kept = [name for name, tensor in constants.items() if tensor.data_type == onnx.TensorProto.INT4]
        read = cache(lambda name: _array(constants[name], folder))
        found = {}
        for name in (*joined, *kept):
            module, _, part = name.rpartition(".")
            if part != "codes":
                continue
            parts = (joined.get(each, (each, None, None)) for each in (name, f"{module}.scale"))
            codes, scale = (read(constant)[:, start:end].contiguous() for constant, start, end in parts)
            if constants[joined.get(name, (name,))[0]].data_type == onnx.TensorProto.INT4:
                found[module] = QuantizedWeight(codes, scale, len(codes) // len(scale))
    except (DecodeError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputFault(
            f"{folder}: {type(error).__name__} {error} where the graph has its int4 weights: expected a graph that `spaceport "
            "export --weights int4` wrote; export the checkpoint again"
        ) from error
    return found


def _array(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    """A constant, in a type that torch has."""
    if onnx.external_data_helper.uses_external_data(tensor):
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == onnx.TensorProto.BFLOAT16:  # a type of its own in numpy
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.astype(np.int8) if tensor.data_type == onnx.TensorProto.INT4 else array.copy())


def _values(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place:
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    dtype, offset = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), int(place.get("offset", 0))
    return torch.from_numpy(np.memmap(folder / place["location"], dtype, "c", offset, tuple(tensor.dims)))
