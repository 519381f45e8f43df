"""File records: digests and sizes of a bundle's files, and what its engines depend on."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import BinaryIO, Literal, get_args

from spaceport.graphs.contract.json_fields import JsonField

_MAX_SIZE = 2**50  # bytes of a file
_MAX_SHAPE = 2**31 - 1  # slots, requests or rows of an engine

Flavour = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
LIBRARIES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # Python modules


@dataclass(frozen=True)
class FileRecord:
    """Digest and size of a file when the bundle was written."""

    sha256: str
    size: int


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine of a bundle, and everything that it depends on."""

    sha256: str  # of the engine's file
    size: int
    graph: tuple[str, ...]  # sha256 of model.onnx and of its data file at build time
    backend: Flavour
    version: str  # of the library that built it; no other version can run it
    target: str  # GPU architecture, such as sm89
    capacity: int  # KV slots per request
    requests: int  # maximum requests per call
    step_rows: int  # maximum rows per request in the decode profile, for which CUDA graphs are captured
    prefill_rows: int  # maximum rows per request in the prefill profile
    refittable: bool = False
    decomposed: int = 0  # layers whose attention runs as matmuls because the library has no fused kernel for it

    @property
    def file(self) -> FileRecord:
        """Digest and size of the engine's file."""
        return FileRecord(self.sha256, self.size)


def record_of(stream: BinaryIO) -> FileRecord:
    """Digest and size of a file, which is read to its end."""
    hasher, size = hashlib.sha256(), 0
    while block := stream.read(2**20):
        hasher.update(block)
        size += len(block)
    return FileRecord(hasher.hexdigest(), size)


def _digest(found: JsonField) -> str:
    value = found.value
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        found.refuse("64 hexadecimal digits")
    return value


def file_record(found: JsonField) -> FileRecord:
    """The record of a file in parsed JSON."""
    entries = found.entries(FileRecord)
    return FileRecord(_digest(entries["sha256"]), entries["size"].whole(0, _MAX_SIZE))


def engine_record(name: str, found: JsonField) -> EngineRecord:
    """The record of the engine with this file name in parsed JSON."""
    entries = found.entries(EngineRecord)
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}\.engine", name) is None:
        raise found.rules.fault(
            f"engines name {name!r}: expected small letters, digits, dots and hyphens, ending in .engine"
        )
    return EngineRecord(
        sha256=_digest(entries["sha256"]),
        size=entries["size"].whole(0, _MAX_SIZE),
        graph=tuple(map(_digest, entries["graph"].items("digests"))),
        backend=entries["backend"].one_of(FLAVOURS),
        version=entries["version"].text(),
        target=entries["target"].text(),
        refittable=entries["refittable"].boolean(),
        **{part: entries[part].whole(1, _MAX_SHAPE) for part in ("capacity", "requests", "step_rows", "prefill_rows")},
        decomposed=entries["decomposed"].whole(0, _MAX_SHAPE),
    )
