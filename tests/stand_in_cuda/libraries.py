"""Libraries: ONNX Runtime with CUDA in a folder of its own, and CUDA libraries whose kernels do nothing.

The provider is the real one, so what it shows is real: which nodes it takes, which graphs it captures, which kernels it
launches and what it copies. No value and no time is."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from support.paths import ROOT, TESTS, package
from support.programs import Missing, install, output_of

FOLDER = ROOT / "build" / "stand_in_cuda"
SITE, _HEADERS, _LIBRARIES = (FOLDER / name for name in ("site", "headers", "lib"))  # headers apart: libcudart is there
_HERE = Path(__file__).parent
_PROVIDER = Path("onnxruntime", "capi", "libonnxruntime_providers_cuda.so")
_HEADER_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-crt==13.5.37")
# The start of a library's function names, and the library; the first that fits
_PREFIXES = {
    "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13",
    "curand": "libcurand.so.10",
    "cuda": "libcudart.so.13",
    "__cuda": "libcudart.so.13",
}
_RUNTIME, _CUDNN, _CUDNN_VERSION = "libcudart.so.13", "libcudnn.so.9", 91900
_PRODUCT = re.compile(r"[gG]emm|LtMatmul$")


def prepare() -> None:
    """Install ONNX Runtime with CUDA and the headers, and build the libraries; nothing that is there already."""
    _install(SITE, "onnxruntime-gpu")
    _install(_HEADERS, *_HEADER_PACKAGES)
    build()


def build() -> None:
    """Compile the libraries, from what the installed provider needs; one process at a time."""
    provider = SITE / _PROVIDER
    if not provider.exists():
        raise Missing(f"got no {provider}, expected ONNX Runtime with CUDA: make cuda-setup")
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(provider)


def _build(provider: Path) -> None:
    sources = [_HERE / name for name in ("runtime.c", "driver.c", Path(__file__).name)]
    last = _LIBRARIES / "libcuda.so.1"
    if last.exists() and last.stat().st_mtime > max(file.stat().st_mtime for file in (*sources, provider)):
        return
    listed = output_of(["nm", "-D", "--undefined-only", provider])
    if f"@{_RUNTIME}" not in listed:
        raise Missing(f"got a provider for another version of CUDA, expected one that needs {_RUNTIME}")
    needed = [name.partition("@")[0] for name in listed.split()]
    shutil.rmtree(_LIBRARIES, ignore_errors=True)
    _LIBRARIES.mkdir(parents=True)
    own = set(re.findall(r"^API [^(\n]*?(\w+)\(", sources[0].read_text("utf-8"), re.M))
    for library in (_RUNTIME, *(name for name in dict.fromkeys(_PREFIXES.values()) if name != _RUNTIME)):
        functions = [_body(name) for name in needed if _library_of(name) == library and name not in own]
        _compile(library, functions, *([sources[0]] if library == _RUNTIME else ["-l:libcudart.so.13"]))
    found = re.findall(rb"\0(cudnn[A-Z][A-Za-z0-9_]+)\0", provider.read_bytes())  # names that it looks up when it runs
    _compile(_CUDNN, [_body(name) for name in sorted({name.decode() for name in found})])
    _compile(last.name, [], sources[1])


def environment(cache: Path) -> dict[str, str]:
    """The variables of a process that has ONNX Runtime with CUDA and the libraries; raises if they are not there."""
    build()
    path = ":".join(map(str, (SITE, package(), TESTS)))
    own = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(_LIBRARIES), "XDG_CACHE_HOME": str(cache)}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def _install(folder: Path, *packages: str) -> None:
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        install(unfinished, "--no-deps", "--no-compile", *packages)
        unfinished.rename(folder)


def _library_of(function: str) -> str | None:
    return next((library for prefix, library in _PREFIXES.items() if function.startswith(prefix)), None)


def _body(name: str) -> str:
    """A function of a library that reports success."""
    if re.match(r"cu(blas|blasLt|dnn)Create(_v2)?$", name):
        return f"int {name}(void **made) {{ *made = calloc(1, 64); return 0; }}"
    if name == "cudnnGetVersion":
        return f"size_t {name}(void) {{ return {_CUDNN_VERSION}; }}"
    if re.search("GetStatus|GetErrorString", name):
        return f'const char *{name}(void) {{ return "an error of the stand-in"; }}'
    return f"int {name}() {{ return {'stand_in_product()' if _PRODUCT.search(name) else '0'}; }}"


def _compile(library: str, functions: Sequence[str], *more: str | Path) -> None:
    source, script = _LIBRARIES / "functions.c", _LIBRARIES / "versions"
    source.write_text("#include <stdlib.h>\nint stand_in_product(void);\n" + "\n".join(functions) + "\n", "utf-8")
    script.write_text(f"{library} {{ global: *; }};\n", "utf-8")
    (include,) = _HEADERS.glob("nvidia/*/include")
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-I{include}"]
    linked = [f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", f"-L{_LIBRARIES}"]
    output_of(["cc", *flags, *linked, "-o", _LIBRARIES / library, source, *more])
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    try:
        prepare()
    except Missing as reason:
        sys.exit(f"stand_in_cuda: {reason}")
    print(f"stand_in_cuda: ONNX Runtime with CUDA is in {FOLDER}")
