"""What a serialized ONNX graph names: files of weights, operators and their versions, without the package onnx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_OPERATOR = 4  # field of a node
_GRAPH, _IMPORT = 7, 8  # fields of a model
_INITIALIZER = 5  # field of a graph
_DIMS, _TYPE, _NAME, _EXTERNAL = 1, 2, 8, 13  # fields of a tensor

# By message of onnx.proto: its fields that can contain a node or a tensor, by number. A tensor lists its external data as
# pairs of a key and a value.
_FIELDS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


class ExternalTensor(NamedTuple):
    """An initializer whose content is a part of a file."""

    name: str
    kind: int  # element type: onnx.TensorProto.DataType
    shape: tuple[int, ...]
    file: str
    begin: int
    bytes: int


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """The initializers of the main graph that have their content in files; raises ValueError if it is not a model."""
    graphs = [part for number, part in _fields(memoryview(model)) if number == _GRAPH]
    tensors = [part for graph in graphs for number, part in _fields(graph) if number == _INITIALIZER]
    return [tensor for part in tensors if (tensor := _external(part)) is not None]


def _external(part: memoryview) -> ExternalTensor | None:
    name, kind, shape, entries = "", 0, list[int](), dict[str, str]()
    for number, value in _values(part):
        if number == _DIMS:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == _TYPE and isinstance(value, int):
            kind = value
        elif number == _NAME and isinstance(value, memoryview):
            name = bytes(value).decode()
        elif number == _EXTERNAL and isinstance(value, memoryview):
            entry = dict(_fields(value))
            entries[bytes(entry.get(1, b"")).decode()] = bytes(entry.get(2, b"")).decode()
    if "location" not in entries:
        return None
    begin, size = int(entries.get("offset", 0)), int(entries.get("length", -1))
    return ExternalTensor(name, kind, tuple(shape), entries["location"], begin, size)


def external_files(model: bytes) -> set[str]:
    """The values of all `location` entries in a serialized ONNX model.

    These are the files from which a session loads weights. Raises ValueError if it is not a model.
    """
    locations: set[str] = set()
    for kind, part in _messages(model):
        if kind == "entry":
            entry = dict(_fields(part))
            if bytes(entry.get(1, b"")) == b"location":
                locations.add(bytes(entry.get(2, b"")).decode())
    return locations


def operators(model: bytes) -> set[str]:
    """The names of all operators in a serialized ONNX model; raises ValueError if it is not one."""
    nodes = (dict(_fields(part)) for kind, part in _messages(model) if kind == "node")
    return {bytes(node.get(_OPERATOR, b"")).decode() for node in nodes}


def imported_version(model: bytes, domain: str) -> int:
    """The version of a domain's operators that a serialized ONNX model imports, 0 if it imports none.

    Raises ValueError if it is not a model."""
    found = 0
    for number, part in _fields(memoryview(model)):
        fields = dict(_values(part)) if number == _IMPORT else {}
        name, version = fields.get(1), fields.get(2)
        if isinstance(name, memoryview) and isinstance(version, int) and bytes(name) == domain.encode():
            found = max(found, version)
    return found


def _messages(model: bytes) -> Iterator[tuple[str, memoryview]]:
    """All messages of a model with their kinds."""
    waiting = [("model", memoryview(model))]
    while waiting:
        kind, part = waiting.pop()
        yield kind, part
        if kind in _FIELDS:
            waiting += [(_FIELDS[kind][number], value) for number, value in _fields(part) if number in _FIELDS[kind]]


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message that have bytes as their value, with their numbers."""
    return ((number, value) for number, value in _values(data) if isinstance(value, memoryview))


def _values(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """The fields of a message that have bytes or a number of variable length as their value, with their numbers."""
    index = 0
    while index < len(data):
        key, index = _varint(data, index)
        kind = key & 7
        if kind == _BYTES:
            size, index = _varint(data, index)
            yield key >> 3, data[index : index + size]
            index += size
        elif kind == _VARINT:
            value, index = _varint(data, index)
            yield key >> 3, value
        elif kind in (_FIXED64, _FIXED32):
            index += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"it has a value of the unknown wire type {kind}")
        if index > len(data):
            raise ValueError("it ends within a value")


def _varints(data: memoryview) -> Iterator[int]:
    index = 0
    while index < len(data):
        value, index = _varint(data, index)
        yield value


def _varint(data: memoryview, index: int) -> tuple[int, int]:
    """A number of variable length, and the index behind it."""
    value = shift = 0
    while True:
        if index >= len(data):
            raise ValueError("it ends within a value")
        byte = data[index]
        value |= (byte & 127) << shift
        index, shift = index + 1, shift + 7
        if byte < 128:
            return value, index
        if shift > 63:
            raise ValueError("it has a number of more than ten bytes")
