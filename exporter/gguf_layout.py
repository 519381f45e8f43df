"""GGUF layout: the bounds of everything in a GGUF file, checked before a reader trusts the counts in it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from spaceport.exporter.sar_config import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by number of the value type
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MOST_ITEMS = 10_000_000  # of an array; the largest vocabularies have a twentieth of it
_MOST_DIMENSIONS = 4
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32  # bytes


class _LayoutError(ValueError):
    """Something in a file exceeds its bounds or is unknown."""


@dataclass
class _Cursor:
    """A position in the bytes of a file, which no read may take beyond its end."""

    data: mmap.mmap | bytes
    position: int = 0

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
        return bytes(self.data[start : start + size]).decode("utf-8", "backslashreplace")


def check_layout(path: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Raise if a part of a GGUF file exceeds the file; `sizes` has weights and bytes per block by tensor type."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise _LayoutError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check(_Cursor(data), sizes)
    except (_LayoutError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete GGUF file ({error}): expected version 2 or 3; download or convert it again"
        ) from error


def _check(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> None:
    start = cursor.skip(len(_MAGIC), "the format's name")
    if cursor.data[start : start + len(_MAGIC)] != _MAGIC:
        raise _LayoutError("it does not begin with GGUF")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        raise _LayoutError("its numbers are big-endian" if version & 0xFFFF == 0 else f"it has version {version}")
    tensors, entries = (cursor.number("<Q", f"the number of {what}") for what in ("tensors", "metadata entries"))
    alignment = _ALIGNMENT
    for _ in range(entries):
        key = cursor.text("a metadata key")
        kind = cursor.number("<I", f"the type of {key}")
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = max(1, cursor.number("<I", key))
        else:
            _skip_value(cursor, key, kind)
    ends = [_tensor_end(cursor, sizes) for _ in range(tensors)]
    begin = -(-cursor.position // alignment) * alignment
    for name, end in ends:
        if begin + end > len(cursor.data):
            raise _LayoutError(f"tensor {name} ends at byte {begin + end}, the file has {len(cursor.data)}")


def _skip_value(cursor: _Cursor, key: str, kind: int) -> None:
    if kind == _STRING:
        cursor.text(key)
    elif kind == _ARRAY:
        item, count = cursor.number("<I", f"the item type of {key}"), cursor.number("<Q", f"the length of {key}")
        if count > _MOST_ITEMS:
            raise _LayoutError(f"{key} has {count} items, at most {_MOST_ITEMS} are supported")
        if item == _STRING:
            for _ in range(count):
                cursor.skip(cursor.number("<Q", f"the length of an item of {key}"), f"an item of {key}")
        elif item in _ITEM_BYTES:
            cursor.skip(count * _ITEM_BYTES[item], key)
        else:
            raise _LayoutError(f"{key} is an array of type {item}")
    elif kind in _ITEM_BYTES:
        cursor.skip(_ITEM_BYTES[kind], key)
    else:
        raise _LayoutError(f"{key} has type {kind}")


def _tensor_end(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> tuple[str, int]:
    """The name of a tensor, and the end of its data relative to the beginning of all data."""
    name = cursor.text("a tensor name")
    dimensions = cursor.number("<I", f"the number of dimensions of {name}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _LayoutError(f"tensor {name} has {dimensions} dimensions")
    shape = [cursor.number("<Q", f"a dimension of {name}") for _ in range(dimensions)]
    kind, offset = cursor.number("<I", f"the type of {name}"), cursor.number("<Q", f"the offset of {name}")
    if kind not in sizes:
        raise _LayoutError(f"tensor {name} has type {kind}")
    weights, size = sizes[kind]
    if min(shape) < 1 or shape[0] % weights:
        raise _LayoutError(f"tensor {name} has shape {shape}, its rows have blocks of {weights}")
    return name, offset + prod(shape) // weights * size
