"""`python -m benchmarks.gpu_machine FOLDER`: pack what a machine with a GPU and without a network lacks.

The machine has a Python with torch for CUDA, transformers and numpy; FOLDER and the checkout are copied there."""

from __future__ import annotations

import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import click

from benchmarks.gpu_machine import there
from benchmarks.gpu_machine.device_code import keep_architecture
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


if __name__ == "__main__":
    main()
