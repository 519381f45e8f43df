"""`python -m benchmarks.gpu_machine FOLDER`: pack what a machine with a GPU and without a network lacks.

The machine has a Python with torch for CUDA, transformers and numpy; FOLDER and the checkout are copied there."""

from __future__ import annotations

import ctypes
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZipFile

import click

from benchmarks.gpu_machine import there
from spaceport.tools.bench.skeleton import SHAPES, write_skeleton
from spaceport.tools.cli.options import PATH
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.terminal.screen import size

ROOT = Path(there.__file__).parents[2]
PACKAGES = ("onnxruntime-gpu", "polygraphy", "onnx-graphsurgeon", "gguf")
_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)), "manylinux2014_x86_64")
# The provider of TensorRT, the C library that the Python module does not link, and tools that nothing here runs
_LEFT_OUT = re.compile(
    r"providers_tensorrt|/libonnxruntime\.so|^onnxruntime/(transformers|tools|quantization|datasets)/"
)
_DICTIONARY = 1 << 28  # bytes

# The section .nv_fatbin of a CUDA library has regions of entries, one for each GPU.
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
    """Rewrite a library with the device code of this architecture only; returns the regions with and without code.

    A region stays where it is, since the program points to it, and begins with the kept entries; the rest is zero.
    """
    data = bytearray(library.read_bytes())
    regions = defaultdict[int, list[_Entry]](list)
    for region, entry in _entries(data, *_section(library)):
        regions[region].append(entry)
    # CUDA refuses an empty region when it loads a library, and code for another GPU only when a kernel of it is called
    every = [entry for entries in regions.values() for entry in entries]
    others = [entry for entry in every if entry.executable and entry.architecture != architecture]
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


def write(folder: Path, site: Path, architecture: int, model: str, preset: int) -> None:
    """Write the folder from the unpacked packages, of which the CUDA provider is changed."""
    folder.mkdir(parents=True)
    kept, empty = keep_architecture(site / _PROVIDER, architecture)
    click.echo(f"device code: {kept} regions for compute capability {architecture / 10}, {empty} without code")
    _pack(site, folder / there.PACKAGES, preset)
    write_skeleton(model, folder / f"{model}.random", "float16", "plain")
    lines = [{"text" if isinstance(one, str) else "messages": one} for one in prompts_of(MODEL).values()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    shutil.copy(there.__file__, folder)


def _site(scratch: Path, python: str) -> Path:
    """The content of the packages for that Python, which pip downloads."""
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", scratch, *platforms]
    pinned = ("--python-version", python, "--implementation", "cp", "-c", ROOT / "constraints.txt", *PACKAGES)
    subprocess.run([*map(str, (*pip, *pinned))], check=True)
    site = scratch / "site"
    for wheel in scratch.glob("*.whl"):
        with ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if not _LEFT_OUT.search(name)])
    return site


def _pack(site: Path, target: Path, preset: int) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": _DICTIONARY}]
    with lzma.open(target, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for file in sorted(site.rglob("*")):
            if file.is_file():
                tar.add(file, str(file.relative_to(site)))


@click.command()
@click.argument("folder", type=PATH)
@click.option("--python", default="3.12", show_default=True, help="Version of Python there.")
@click.option("--architecture", default=90, show_default=True, help="Compute capability of the GPU, as 90 for 9.0.")
@click.option("--model", default="7b", show_default=True, type=click.Choice([*SHAPES]), help="Random model to time.")
@click.option(
    "--preset", default=9, show_default=True, type=click.IntRange(0, 9), help="Preset of xz; 9 takes minutes."
)
def main(folder: Path, python: str, architecture: int, model: str, preset: int) -> None:
    """Write packages, a random model without weights, prompts and there.py, which runs them, to a new FOLDER."""
    with TemporaryDirectory() as scratch:
        write(folder, _site(Path(scratch), python), architecture, model, preset)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    tracked = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    for name, files in ((str(folder), folder.rglob("*")), ("files of the checkout", tracked)):
        click.echo(f"{name}: {size(sum(file.stat().st_size for file in files if file.is_file()))}")


if __name__ == "__main__":
    main()
