"""Device code: a CUDA library without its kernels for other GPUs and without those that no bundle reaches, an eighth of it.

The section .nv_fatbin has regions of entries, one for each GPU. A region stays where it is, since the program points to it,
and begins with the entry that is kept; the rest is zero, which compresses to nothing."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SECTION, _MAGIC = ".nv_fatbin", 0xBA55ED50
_REGION = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the code
_ARCHITECTURE = 28  # bytes from an entry to its architecture
_MACHINE_CODE = 2  # kind; 1: PTX
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
# Mixtures of experts and int4 products as operators of their own, and flash attention in bfloat16: exported graphs have none
_UNUSED = re.compile("MoeFCGemm|GroupProblemShape|moe_gemv|[mM]oe|fpA_intB|5flash.*bfloat16")


class _Entry(NamedTuple):
    """Code for one GPU."""

    start: int  # of its header
    code: int
    end: int
    architecture: int
    executable: bool  # not PTX


def keep_architecture(library: Path, architecture: int) -> tuple[int, int]:
    """Rewrite a library with the device code of this architecture only; returns the regions with and without code."""
    data = bytearray(library.read_bytes())
    regions = defaultdict[int, list[_Entry]](list)
    for region, entry in _entries(data, *_section(library)):
        regions[region].append(entry)
    # CUDA refuses an empty region when it loads a library, and code for another GPU only when a kernel of it is called
    others = [
        entry
        for found in regions.values()
        for entry in found
        if entry.executable and entry.architecture != architecture
    ]
    least = min(others, key=lambda entry: entry.end - entry.start)
    filler, empty = bytes(data[least.start : least.end]), 0
    for region, entries in regions.items():
        kept = [data[entry.start : entry.end] for entry in entries if _is_kept(data, entry, architecture)]
        content = b"".join(kept) or filler
        empty += not kept
        start, end = entries[0].start, entries[-1].end
        data[start:end] = content.ljust(end - start, b"\0")
        header = _REGION.unpack_from(data, region)
        _REGION.pack_into(data, region, *header[:3], len(content))
    library.write_bytes(data)
    return len(regions) - empty, empty


def _section(library: Path) -> tuple[int, int]:
    """The place of the device code in a library, and its bytes."""
    listed = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name, *fields = [*line.partition("]")[2].split(), ""]
        if name == _SECTION:
            return int(fields[2], 16), int(fields[3], 16)
    raise ValueError(f"{library}: got no section {_SECTION}, expected a CUDA library")


def _entries(data: bytearray, start: int, size: int) -> Iterator[tuple[int, _Entry]]:
    """The entries of all regions, each with the place of its region."""
    region, end = start, start + size
    while region + _REGION.size <= end:
        magic, _, header, length = _REGION.unpack_from(data, region)
        if magic != _MAGIC:  # between regions
            region += 8
            continue
        entry, after = region + header, region + header + length
        while entry < after:
            kind, _, head, code = _ENTRY.unpack_from(data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE)
            yield region, _Entry(entry, entry + head, entry + head + code, architecture, kind == _MACHINE_CODE)
            entry += head + code
        region = after


def _is_kept(data: bytearray, entry: _Entry, architecture: int) -> bool:
    if entry.architecture != architecture or not entry.executable:
        return False
    names = re.findall(rb"\.text\.([A-Za-z0-9_$.]+)\0", _unpacked(bytes(data[entry.code : entry.end])))
    kernels = {name.decode() for name in names if b"EmptyKernel" not in name}
    return not kernels or not all(map(_UNUSED.search, kernels))


def _unpacked(code: bytes) -> bytes:
    """Code that may be compressed."""
    if not code.startswith(_ZSTANDARD):
        return code
    library = ctypes.CDLL("libzstd.so.1")
    for name in ("ZSTD_getFrameContentSize", "ZSTD_findFrameCompressedSize", "ZSTD_decompress"):
        getattr(library, name).restype = ctypes.c_size_t
    size, packed = ctypes.c_size_t(len(code)), library.ZSTD_findFrameCompressedSize(code, ctypes.c_size_t(len(code)))
    content = ctypes.create_string_buffer(library.ZSTD_getFrameContentSize(code, size))
    library.ZSTD_decompress(content, ctypes.c_size_t(len(content)), code, ctypes.c_size_t(packed))
    return content.raw
