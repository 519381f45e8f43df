"""External data: the names of the files from which an ONNX graph loads its weights, without the package onnx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


class _Message(NamedTuple):
    """The fields of a protobuf message that can contain a tensor, by field number."""

    inner: Mapping[int, str]


# Field numbers of onnx.proto. A tensor lists its external data as pairs of a key and a value.
_MESSAGES = {
    "model": _Message({7: "graph", 20: "training", 25: "function"}),
    "training": _Message({1: "graph", 2: "graph"}),
    "function": _Message({7: "node", 11: "attribute"}),
    "graph": _Message({1: "node", 5: "tensor", 15: "sparse"}),
    "node": _Message({5: "attribute"}),
    "attribute": _Message({5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"}),
    "sparse": _Message({1: "tensor", 2: "tensor"}),
    "tensor": _Message({13: "entry"}),
}


def external_files(model: bytes) -> frozenset[str]:
    """The values of all `location` entries in a serialized ONNX model; raises ValueError if it is not one."""
    try:
        return frozenset(_locations(memoryview(model), "model"))
    except IndexError as error:
        raise ValueError("it ends within a value") from error


def _locations(data: memoryview, kind: str) -> Iterator[str]:
    """The locations in a message of this kind and in all messages inside it."""
    waiting = [(data, kind)]
    while waiting:
        part, kind = waiting.pop()
        for number, value in _fields(part):
            inner = _MESSAGES[kind].inner.get(number)
            if inner == "entry":
                entry = dict(_fields(value))
                if bytes(entry.get(1, b"")) == b"location":
                    yield bytes(entry.get(2, b"")).decode()
            elif inner is not None:
                waiting.append((value, inner))


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message that have bytes as their value, with their numbers."""
    index = 0
    while index < len(data):
        key, index = _varint(data, index)
        kind = key & 7
        if kind == _BYTES:
            size, index = _varint(data, index)
            yield key >> 3, data[index : index + size]
            index += size
        elif kind == _VARINT:
            _, index = _varint(data, index)
        elif kind in (_FIXED64, _FIXED32):
            index += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"it has a value of the unknown wire type {kind}")
        if index > len(data):
            raise ValueError("it ends within a value")


def _varint(data: memoryview, index: int) -> tuple[int, int]:
    """A number of variable length, and the index behind it."""
    value = shift = 0
    while True:
        byte = data[index]
        value |= (byte & 127) << shift
        index, shift = index + 1, shift + 7
        if byte < 128:
            return value, index
        if shift > 63:
            raise ValueError("it has a number of more than ten bytes")
