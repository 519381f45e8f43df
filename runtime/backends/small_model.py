"""Small model: ONNX models of a few nodes, written without the package onnx, which only exports need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ONNX_DOMAIN, ORT_DOMAIN = "", "com.microsoft"
_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int8): 3, np.dtype(np.float16): 10}
_OPSET, _IR_VERSION, _INTEGER = 21, 10, 2


def model(
    nodes: Iterable[bytes],
    tensors: Mapping[str, NDArray[Any]],
    given: tuple[str, type, int],
    made: tuple[str, type, int],
) -> bytes:
    """An ONNX model with one input and one output of rows: each its name, type and number of columns."""
    graph = b"".join(
        (
            *(_field(1, each) for each in nodes),
            _field(2, b"g"),
            *(_field(5, _tensor(name, values)) for name, values in tensors.items()),
            _field(11, _rows(*given)),
            _field(12, _rows(*made)),
        )
    )
    domains = ((ONNX_DOMAIN, _OPSET), (ORT_DOMAIN, 1))
    versions = (_field(8, _field(1, domain.encode()) + _field(2, version)) for domain, version in domains)
    return b"".join((_field(1, _IR_VERSION), _field(7, graph), *versions))


def node(kind: str, inputs: Iterable[str], output: str, domain: str = ONNX_DOMAIN, **attributes: int) -> bytes:
    """A node of a graph, with integer attributes."""
    settings = (
        _field(1, name.encode()) + _field(3, value) + _field(20, _INTEGER) for name, value in attributes.items()
    )
    return b"".join(
        (
            *(_field(1, name.encode()) for name in inputs),
            _field(2, output.encode()),
            _field(4, kind.encode()),
            *(_field(5, setting) for setting in settings),
            _field(7, domain.encode()),
        )
    )


def _tensor(name: str, values: NDArray[Any]) -> bytes:
    sizes = b"".join(_field(1, size) for size in values.shape)
    return sizes + _field(2, _TYPES[values.dtype]) + _field(8, name.encode()) + _field(9, values.tobytes())


def _rows(name: str, dtype: type, columns: int) -> bytes:
    shape = _field(1, _field(2, b"rows")) + _field(1, _field(1, columns))
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, _TYPES[np.dtype(dtype)]) + _field(2, shape)))


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
