"""Append graph: load and check the graph of a bundle for TensorRT, with a fixed number of KV slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.signature import Signature, Tensor

_NAMES = {dtype.onnx: name for name, dtype in DTYPES.items()}


class UnbuildableGraph(InputFault):
    """A graph from which no engine can be built; the message states the problem and what to do."""


def append_graph(folder: Path, signature: Signature, capacity: int) -> onnx.ModelProto:
    """The graph of a bundle with KV buffers of `capacity` slots, without its weights; no file is changed."""
    refuse_scatter(folder, signature)
    path = folder / MODEL_FILE
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise UnbuildableGraph(f"{path}: cannot be read ({error}): export it again") from error
    check_graph(model, signature, path)
    fix_capacity(model, capacity)
    return model


def refuse_scatter(folder: Path, signature: Signature) -> None:
    """Raise for a bundle with the scatter lowering: TensorRT can write in place only to consecutive slots."""
    if signature.lowering != "append":
        raise UnbuildableGraph(
            f"{folder}: has the {signature.lowering} lowering, TensorRT needs append: export it again with --lowering append"
        )


def check_graph(model: onnx.ModelProto, signature: Signature, path: Path) -> None:
    """Raise unless inputs and outputs match the signature, and KV buffers are written in place by TensorScatter."""
    for kind, values, tensors in (
        ("input", model.graph.input, signature.inputs),
        ("output", model.graph.output, signature.outputs),
    ):
        for value, tensor in zip_longest(values, tensors):
            got, expected = _value(value), _tensor(tensor)
            if got != expected:
                raise UnbuildableGraph(f"{path}: has the {kind} {got}, the manifest says {expected}: export it again")
    _check_external_data(model.graph, path)
    writers = {node.output[0]: node for node in model.graph.node if node.op_type == "TensorScatter"}
    for past, present in zip(signature.past, signature.present, strict=True):
        writer = writers.get(present.name)
        if writer is None or writer.input[0] != past.name:
            raise UnbuildableGraph(
                f"{path}: {present.name} is not {past.name} updated by TensorScatter, so KV buffers cannot be updated in "
                "place: export it again with --lowering append"
            )


def _check_external_data(graph: onnx.GraphProto, path: Path) -> None:
    """Raise if a weight is stored in a file other than the data file, whose digest the manifest records."""
    constants = (attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t"))
    for tensor in (*graph.initializer, *constants):
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value != DATA_FILE:
                raise UnbuildableGraph(
                    f"{path}: {tensor.name} is stored in {entry.value!r}, expected {DATA_FILE}: export it again"
                )


def fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    """Replace the dynamic dimension S by a number: TensorRT's KV cache update needs a static size."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "S":
                dimension.dim_value = capacity


def _value(value: onnx.ValueInfoProto | None) -> str:
    if value is None:
        return "(none)"
    kind = value.type.tensor_type
    shape = [size.dim_value if size.HasField("dim_value") else size.dim_param for size in kind.shape.dim]
    return _described(value.name, _NAMES.get(kind.elem_type) or onnx.TensorProto.DataType.Name(kind.elem_type), shape)


def _tensor(tensor: Tensor | None) -> str:
    return "(none)" if tensor is None else _described(tensor.name, tensor.dtype, tensor.shape)


def _described(name: str, dtype: str, shape: Sequence[int | str]) -> str:
    return f"{name} {dtype} [{', '.join(map(str, shape))}]"
