"""The metadata of a GGUF model file, with the bounds of everything in it checked, and refused if it cannot load exactly."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import CheckpointError, MissingDependency
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.json_fields import short

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # those whose logits the tests compare with the original model
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# By number of the value type; numpy's names of numbers
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
# Limits of all metadata of a file together. A vocabulary of 300,000 tokens has 1.4 million items in 30 MB, with scores,
# types and 500,000 merges; models have less than 100 entries.
_MOST_ENTRIES, _MOST_TENSORS, _MOST_ITEMS, _MOST_BYTES = 2**9, 2**16, 1_600_000, 2**26
_MOST_DIMENSIONS = 4
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32  # bytes
_SIZE = struct.Struct("<Q")


class _LayoutError(ValueError):
    """Something in a file exceeds its bounds or is unknown."""


class _LimitError(ValueError):
    """A file has more of something than any known model."""


def _require_at_most(most: int, count: int, what: str) -> None:
    if count > most:
        raise _LimitError(f"it has {count} {what}: expected at most {most}; export the original checkpoint")


@dataclass
class _Cursor:
    """A position in the bytes of a file, which no read may take beyond its end."""

    data: mmap.mmap | bytes
    position: int = 0
    items: int = 0  # of all arrays until here

    def skip(self, count: int, what: str) -> int:
        """Move on by this many bytes; returns the position before."""
        start = self.position
        if count > len(self.data) - start:
            raise _LayoutError(f"{what} at byte {start} has {count} bytes, the file has {len(self.data) - start} more")
        self.position += count
        return start

    def number(self, form: str, what: str) -> int:
        start = self.skip(struct.calcsize(form), what)
        value: int = struct.unpack_from(form, self.data, start)[0]
        return value

    def text(self, what: str) -> str:
        size = self.number("<Q", f"the length of {what}")
        start = self.skip(size, what)
        _require_at_most(_MOST_BYTES, self.position, f"bytes up to the end of {what}")
        return self._decoded(start, size, what)

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        start = self.skip(count * np.dtype(_NUMBERS[kind]).itemsize, what)
        _require_at_most(_MOST_BYTES, self.position, f"bytes up to the end of {what}")
        values: list[Any] = np.frombuffer(self.data[start : self.position], _NUMBERS[kind]).tolist()
        return values

    def texts(self, count: int, what: str) -> list[str]:
        values = []
        for _ in range(count):
            if self.position + _SIZE.size > len(self.data):
                self.skip(_SIZE.size, f"the length of an item of {what}")
            (size,) = _SIZE.unpack_from(self.data, self.position)
            self.position += _SIZE.size
            start = self.skip(size, f"an item of {what}")
            if self.position > _MOST_BYTES:
                _require_at_most(_MOST_BYTES, self.position, f"bytes up to the end of {what}")
            values.append(self._decoded(start, size, what))
        return values

    def value(self, kind: int, key: str) -> Any:
        """A value of metadata."""
        if kind == _STRING:
            return self.text(key)
        if kind in _NUMBERS:
            return self.numbers(kind, 1, key)[0]
        if kind != _ARRAY:
            raise _LayoutError(f"{key} has type {kind}")
        item, count = self.number("<I", f"the item type of {key}"), self.number("<Q", f"the length of {key}")
        self.items += count
        _require_at_most(_MOST_ITEMS, self.items, f"items in the arrays up to {key}")
        if item == _STRING:
            return self.texts(count, key)
        if item not in _NUMBERS:
            raise _LayoutError(f"{key} is an array of type {item}")
        return self.numbers(item, count, key)

    def _decoded(self, start: int, size: int, what: str) -> str:
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise _LayoutError(f"{what} at byte {start} is not UTF-8") from error


class TensorType(NamedTuple):
    """A type of tensors, whose rows are divided into blocks."""

    name: str
    weights: int  # of a block
    size: int  # of a block, in bytes


@dataclass(frozen=True)
class GgufTensor:
    """A tensor without its data."""

    kind: str  # name of its type
    shape: tuple[int, ...]  # innermost dimension first
    begin: int = 0  # of its data in the file
    end: int = 0


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file without its tensor data."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]  # arrays included
    tensors: Mapping[str, GgufTensor]  # by name

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value below `tokenizer.ggml.`."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def data_of(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The data of a tensor, read when it is used."""
        return np.memmap(self.path, np.uint8, "r", tensor.begin, (tensor.end - tensor.begin,))

    def refuse(self, problem: str, expected: str, advice: str = "convert the model again") -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}: expected {expected}; {advice}")


def read_layout(path: Path, types: Mapping[int, TensorType]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and tensors of a GGUF file; raise if a part of it exceeds the file, or a known model's size."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise _LayoutError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parts(_Cursor(data), types)
    except _LimitError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (_LayoutError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete GGUF file ({error}): expected version 2 or 3; download or convert it again"
        ) from error


def _parts(cursor: _Cursor, types: Mapping[int, TensorType]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    start = cursor.skip(len(_MAGIC), "the format's name")
    if cursor.data[start : start + len(_MAGIC)] != _MAGIC:
        raise _LayoutError("it does not begin with GGUF")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        raise _LayoutError("its numbers are big-endian" if version & 0xFFFF == 0 else f"it has version {version}")
    count, entries = (cursor.number("<Q", f"the number of {what}") for what in ("tensors", "metadata entries"))
    _require_at_most(_MOST_TENSORS, count, "tensors")
    _require_at_most(_MOST_ENTRIES, entries, "metadata entries")
    metadata = _metadata(cursor, entries)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name, tensor = _tensor(cursor, types)
        if name in tensors:
            raise _LayoutError(f"it has the tensor {name} twice")
        tensors[name] = tensor
    alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
    begin = -(-cursor.position // alignment) * alignment
    placed = {name: replace(each, begin=begin + each.begin, end=begin + each.end) for name, each in tensors.items()}
    for name, tensor in placed.items():
        if tensor.end > len(cursor.data):
            raise _LayoutError(f"tensor {name} ends at byte {tensor.end}, the file has {len(cursor.data)}")
    return metadata, placed


def _metadata(cursor: _Cursor, entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise _LayoutError(f"it has {key} twice")
        kind = cursor.number("<I", f"the type of {key}")
        metadata[key] = value = cursor.value(kind, key)
        if key == _ALIGNMENT_KEY and (kind != _UINT32 or value < 1 or value & (value - 1)):
            raise _LayoutError(f"{key} is {short(value)}, not a power of two")
    return metadata


def _tensor(cursor: _Cursor, types: Mapping[int, TensorType]) -> tuple[str, GgufTensor]:
    """A tensor with its name; where its data is, is relative to the beginning of all data."""
    name = cursor.text("a tensor name")
    dimensions = cursor.number("<I", f"the number of dimensions of {name}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _LayoutError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.number("<Q", f"a dimension of {name}") for _ in range(dimensions))
    kind, offset = cursor.number("<I", f"the type of {name}"), cursor.number("<Q", f"the offset of {name}")
    if kind not in types:
        raise _LayoutError(f"tensor {name} has type {kind}")
    of_kind = types[kind]
    if min(shape) < 1 or shape[0] % of_kind.weights:
        raise _LayoutError(f"tensor {name} has shape {list(shape)}, its rows have blocks of {of_kind.weights}")
    size = prod(shape) // of_kind.weights * of_kind.size
    return name, GgufTensor(of_kind.name, shape, offset, offset + size)


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file; raise if its model cannot be loaded exactly."""
    if find_spec("gguf") is None:
        raise MissingDependency(
            f"{path}: loading GGUF files needs the package gguf, which is not installed: {install_command('gguf')}"
        )
    from gguf import GGML_QUANT_SIZES

    types = {int(kind): TensorType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    metadata, tensors = read_layout(path, types)
    file = GgufFile(path, str(metadata.get("general.architecture")), metadata, tensors)
    _check_architecture(file)
    for name, tensor in file.tensors.items():
        if tensor.kind not in TENSOR_TYPES:
            file.refuse(
                f"tensor {name} has type {tensor.kind}, which is not supported",
                f"one of {', '.join(TENSOR_TYPES)}",
                "quantize the model to another type",
            )
    return file


def _check_architecture(file: GgufFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type is {kind!r}: expected a model")
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        file.refuse(f"one of {parts!r} parts", "a single file", "merge them with llama-gguf-split --merge")
    if file.architecture not in ARCHITECTURES:
        file.refuse(
            f"architecture {file.architecture!r} is not supported in GGUF files",
            f"one of {', '.join(ARCHITECTURES)}",
            "export the original checkpoint",
        )
