"""Append graph: a bundle's model.onnx in memory, held against the contract and with its capacity fixed."""

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
    """A graph that no engine can be built from; the message says where and what to do."""


def append_graph(folder: Path, signature: Signature, capacity: int) -> onnx.ModelProto:
    """The graph of a bundle with buffers of `capacity` slots; its weights stay in their file, nothing is written."""
    refuse_scatter(folder, signature)
    path = folder / MODEL_FILE
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise UnbuildableGraph(f"{path}: cannot be read ({error}): export it again") from error
    lint(model, signature, path)
    fix_capacity(model, capacity)
    return model


def refuse_scatter(folder: Path, signature: Signature) -> None:
    """Raise for a bundle whose graph writes rows to any slots: TensorRT writes runs only, and in place only those."""
    if signature.lowering != "append":
        raise UnbuildableGraph(
            f"{folder}: has the {signature.lowering} lowering, TensorRT needs append: export it with --lowering append"
        )


def lint(model: onnx.ModelProto, signature: Signature, path: Path) -> None:
    """Raise if a graph is not, to the name, order, type and dimension, what the signature says, or writes elsewhere."""
    for kind, values, tensors in (
        ("input", model.graph.input, signature.inputs),
        ("output", model.graph.output, signature.outputs),
    ):
        for value, tensor in zip_longest(values, tensors):
            got, expected = _value(value), _tensor(tensor)
            if got != expected:
                raise UnbuildableGraph(f"{path}: has the {kind} {got}, the manifest says {expected}: export it again")
    _hold_together(model.graph, path)
    writers = {node.output[0]: node for node in model.graph.node if node.op_type == "TensorScatter"}
    for past, present in zip(signature.past, signature.present, strict=True):
        writer = writers.get(present.name)
        if writer is None or writer.input[0] != past.name:
            raise UnbuildableGraph(
                f"{path}: {present.name} is not {past.name} with rows written to it by TensorScatter, so the KV buffers "
                "could not stay in place: export it again with --lowering append"
            )


def _hold_together(graph: onnx.GraphProto, path: Path) -> None:
    """Raise if a weight lies in a file that nobody has looked at."""
    constants = (attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t"))
    for tensor in (*graph.initializer, *constants):
        for told in tensor.external_data:
            if told.key == "location" and told.value != DATA_FILE:
                raise UnbuildableGraph(
                    f"{path}: {tensor.name} lies in {told.value!r}, expected {DATA_FILE}, whose digest the manifest tells: "
                    "export it again"
                )


def fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    """Give the dimension of slots its number wherever it is named: TensorRT's KV update asks for it."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "S":
                dimension.dim_value = capacity


def _value(value: onnx.ValueInfoProto | None) -> str:
    if value is None:
        return "nothing more"
    kind = value.type.tensor_type
    shape = [size.dim_value if size.HasField("dim_value") else size.dim_param for size in kind.shape.dim]
    return _told(value.name, _NAMES.get(kind.elem_type) or onnx.TensorProto.DataType.Name(kind.elem_type), shape)


def _tensor(tensor: Tensor | None) -> str:
    return "nothing more" if tensor is None else _told(tensor.name, tensor.dtype, tensor.shape)


def _told(name: str, dtype: str, shape: Sequence[int | str]) -> str:
    return f"{name} {dtype} [{', '.join(map(str, shape))}]"
