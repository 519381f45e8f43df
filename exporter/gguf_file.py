"""The metadata of a GGUF model file, with the bounds of everything in it checked, and refused if it cannot load exactly."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.json_fields import short

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # those whose logits the tests compare with the original model
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
_PACKAGES = ("gguf", "accelerate")  # transformers needs both to load a GGUF file
_HEAD_DIM_KEYS = ("attention.key_length", "attention.value_length")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by number of the value type
_UINT32, _STRING, _ARRAY = 4, 8, 9
# Limits of all metadata of a file together: the package gguf takes up to 3 KB of memory per entry, and 0.7 to 1.6 KB per item
# of an array. A vocabulary of 300,000 tokens has 1.4 million items in 30 MB, with scores, types and 500,000 merges.
_MOST_ENTRIES, _MOST_TENSORS, _MOST_ITEMS, _MOST_BYTES = 2**14, 2**16, 1_600_000, 2**26
_MOST_DIMENSIONS = 4
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32  # bytes


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
        return bytes(self.data[start : start + size]).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor without its data."""

    kind: str  # name of its type
    shape: tuple[int, ...]  # innermost dimension first


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

    def refuse(self, problem: str, expected: str, advice: str = "convert the model again") -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}: expected {expected}; {advice}")


def check_layout(path: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Raise if a part of a GGUF file exceeds the file, so that a reader may trust the counts in it.

    `sizes` has weights and bytes per block by tensor type."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise _LayoutError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_parts(_Cursor(data), sizes)
    except _LimitError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (_LayoutError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete GGUF file ({error}): expected version 2 or 3; download or convert it again"
        ) from error


def _check_parts(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> None:
    start = cursor.skip(len(_MAGIC), "the format's name")
    if cursor.data[start : start + len(_MAGIC)] != _MAGIC:
        raise _LayoutError("it does not begin with GGUF")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        raise _LayoutError("its numbers are big-endian" if version & 0xFFFF == 0 else f"it has version {version}")
    tensors, entries = (cursor.number("<Q", f"the number of {what}") for what in ("tensors", "metadata entries"))
    _require_at_most(_MOST_TENSORS, tensors, "tensors")
    _require_at_most(_MOST_ENTRIES, entries, "metadata entries")
    alignment = _ALIGNMENT
    for _ in range(entries):
        key = cursor.text("a metadata key")
        kind = cursor.number("<I", f"the type of {key}")
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = max(1, cursor.number("<I", key))
        else:
            _skip_value(cursor, key, kind)
            _require_at_most(_MOST_BYTES, cursor.position, f"bytes up to the end of {key}")
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
        cursor.items += count
        _require_at_most(_MOST_ITEMS, cursor.items, f"items in the arrays up to {key}")
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


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file; raise if its model cannot be loaded exactly."""
    require_checkpoint(path)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{path}: loading GGUF files needs the package {missing[0]}, which is not installed: "
            f"{install_command('gguf')}"
        )
    file = _read(path)
    _check_architecture(file)
    _check_hyperparameters(file)
    for name, tensor in file.tensors.items():
        if tensor.kind not in TENSOR_TYPES:
            file.refuse(
                f"tensor {name} has type {tensor.kind}, which is not supported",
                f"one of {', '.join(TENSOR_TYPES)}",
                "quantize the model to another type",
            )
    return file


def _read(path: Path) -> GgufFile:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    check_layout(path, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            tensor.name: GgufTensor(tensor.tensor_type.name, tuple(map(int, tensor.shape))) for tensor in reader.tensors
        }
    except Exception as error:  # numpy and the package raise many types
        raise CheckpointError(
            f"{path}: not a valid GGUF file ({error}): expected version 2 or 3; download or convert it again"
        ) from error
    return GgufFile(path, str(metadata.get("general.architecture")), metadata, tensors)


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


def _check_hyperparameters(file: GgufFile) -> None:
    """Raise for hyperparameters that transformers ignores, such as RoPE scaling."""
    mapping: Any = GGUF_CONFIG_MAPPING
    known = {*mapping[file.architecture], *_HEAD_DIM_KEYS}
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{file.architecture}.")
        if name != key and name not in known and (name, value) != ("rope.scaling.type", "none"):
            file.refuse(
                f"{key} is {short(value)}, which cannot be loaded from GGUF files",
                "a model without it",
                "export the original checkpoint",
            )
