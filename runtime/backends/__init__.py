"""Backends: the backends that can run a bundle, and the function that opens them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.manifest import LIBRARIES, Flavour
from spaceport.runtime.backends.built_engines import engine_for
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import Bundle, BundleError, ChangedWhileOpening, open_bundle
from spaceport.runtime.engine import Engine, EngineOptions

MOST_THREADS = max(64, 2 * (os.cpu_count() or 1))  # against typing errors that would overload the machine

_ATTEMPTS = 4  # an export replaces a folder in one step, so the second one nearly always succeeds


class Backend(NamedTuple):
    """A backend: its module and what it requires."""

    opener: str  # module of this package with `open_engine`
    module: str  # Python module that it needs
    extra: str  # extra of spaceport that installs it
    flavour: Flavour | None = None  # flavour of its compiled engines; None: it runs the graph itself
    gpu: bool = True


# In the order in which `auto` tries them.
BACKENDS = {
    "tensorrt": Backend("on_tensorrt", LIBRARIES["tensorrt"], "tensorrt", "tensorrt"),
    "tensorrt-rtx": Backend("on_tensorrt", LIBRARIES["tensorrt-rtx"], "tensorrt-rtx", "tensorrt-rtx"),
    "onnxruntime-cuda": Backend("on_cuda", "onnxruntime", "gpu"),
    "onnxruntime": Backend("on_onnxruntime", "onnxruntime", "cpu", gpu=False),
}


class Opened(NamedTuple):
    """An open bundle and its engine."""

    bundle: Bundle
    engine: Engine
    backend: str
    notes: tuple[str, ...]  # why better backends were not used, one sentence each
    options: EngineOptions
    verify_seconds: float  # until the hashes of all files were verified
    engine_seconds: float  # until the engine was opened


class MissingBackend(MissingDependency):
    """No installed backend or device can run the bundle; the message says what to install."""


def open_with_engine(
    path: str | os.PathLike[str],
    backend: str,
    options_for: Callable[[Bundle], EngineOptions],
    *,
    allow_links: bool = False,
    copy_weights: bool | None = None,
) -> Opened:
    """The bundle in a folder, and its engine with the options that this bundle gets.

    Both are opened again if the folder is replaced meanwhile.
    """
    attempts = _ATTEMPTS
    while True:
        before, started = _identity(path), perf_counter()
        try:
            bundle = open_bundle(path, allow_links=allow_links, copy_weights=copy_weights)
            verified = perf_counter()
            options = options_for(bundle)
            name, notes = resolve(bundle, backend, options)
            engine = _open(bundle, name, options)
            return Opened(bundle, engine, name, notes, options, verified - started, perf_counter() - verified)
        except BundleError as error:
            attempts -= 1
            changed = isinstance(error, ChangedWhileOpening) or _identity(path) != before
            if not changed or not attempts:
                raise


def open_engine(bundle: Bundle, backend: str, options: EngineOptions) -> Engine:
    """The engine of the backend of this name, or with `auto` of the best one that can run the bundle here."""
    return _open(bundle, resolve(bundle, backend, options)[0], options)


def resolve(bundle: Bundle, backend: str, options: EngineOptions) -> tuple[str, tuple[str, ...]]:
    """The name of the backend that runs the bundle, and why better ones cannot; raises if it cannot run here.

    With `auto` it is the best one that can, or the reason of the last one is raised. Reasons are left out where no better
    one is expected: without a GPU, for a bundle without engines.
    """
    if backend not in ("auto", *BACKENDS):
        raise OptionFault(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")
    check_threads(options.threads)
    *better, last = BACKENDS if backend == "auto" else (backend,)
    reasons: dict[str, str] = {}
    for name in better:
        if (reason := why_not(bundle, name, options)) is None:
            break
        reasons[name] = reason
    else:
        name = last
        require(bundle, name, options)
    expected = no_gpu() is None or bundle.manifest.engines
    return name, tuple(f"not {line}" for line in by_reason(reasons)) if expected else ()


def _open(bundle: Bundle, backend: str, options: EngineOptions) -> Engine:
    chosen = BACKENDS[backend]
    opener = import_module(f"spaceport.runtime.backends.{chosen.opener}")
    try:
        engine: Engine = opener.open_engine(bundle, options, *((chosen.flavour,) if chosen.flavour else ()))
    except MemoryError as error:
        gigabytes = bundle.manifest.signature.kv_bytes(options.requests, options.capacity) / 1e9
        raise OptionFault(
            f"{gigabytes:.1f} GB of KV buffers for {options.capacity} slots do not fit into memory: lower max_seq_len"
        ) from error
    return engine


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Device and inode of a folder; None if there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """One line for each reason, with all backends that it applies to."""
    shared: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        shared.setdefault(reason.removeprefix(f"backend {name} "), []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in shared.items()]


def why_not(bundle: Bundle, backend: str, options: EngineOptions) -> str | None:
    """Why a backend cannot run the bundle here; None if it can."""
    try:
        require(bundle, backend, options)
    except (MissingDependency, InputFault, OptionFault) as error:
        return str(error)
    return None


def require(bundle: Bundle, backend: str, options: EngineOptions) -> None:
    """Raise if a backend cannot run the bundle here; loads no weights and no engine."""
    flavour, signature = BACKENDS[backend].flavour, bundle.manifest.signature
    require_device(backend)
    if backend not in (number_format := bundle.manifest.number_format).backends:
        other = "float16" if BACKENDS[backend].gpu else "float32"
        raise InputFault(
            f"{bundle.path}: its format is {number_format.name}, which backend {backend} does not run: expected one of "
            f"{', '.join(number_format.backends)}, or a bundle that was exported with --format {other}"
        )
    if flavour is not None and signature.lowering != "append":
        raise InputFault(
            f"{bundle.path}: its graph is scatter-lowered, backend {backend} runs engines of append-lowered graphs: export "
            "it with --lowering append, then `spaceport build` it"
        )
    if flavour is not None:
        engine_for(bundle, flavour, None, gpu().target, options)
    if backend == "onnxruntime-cuda" and signature.lowering != "scatter":
        raise InputFault(
            f"{bundle.path}: its graph is append-lowered, backend {backend} runs scatter-lowered graphs: export it with "
            "--lowering scatter, or `spaceport build` an engine"
        )
    require_module(backend)


def require_device(backend: str) -> None:
    """Raise if this machine has no device for a backend."""
    if BACKENDS[backend].gpu and (reason := no_gpu()) is not None:
        raise MissingBackend(f"backend {backend} needs an NVIDIA GPU: {reason}")


def require_module(backend: str) -> None:
    """Raise if a backend's Python module is missing or unsuitable."""
    module, extra = BACKENDS[backend].module, BACKENDS[backend].extra
    install = install_command(extra)
    if backend == "onnxruntime-cuda" and (clash := clashing()) is not None:
        raise MissingBackend(f"backend {backend} needs onnxruntime-gpu alone: {clash}, then {install}")
    imported = _imported(module, f"backend {backend} needs the package {module}", install)
    if backend == "onnxruntime-cuda" and "CUDAExecutionProvider" not in imported.get_available_providers():
        raise MissingBackend(
            f"backend {backend} needs an onnxruntime with CUDA, this one has {', '.join(imported.get_available_providers())}: "
            f"pip uninstall onnxruntime onnxruntime-gpu, then {install}"
        )
    if BACKENDS[backend].flavour is not None:
        buffers = f"backend {backend} keeps its buffers in torch"
        torch = _imported("torch", buffers, install)
        if not torch.cuda.is_available():
            raise MissingBackend(
                f"{buffers}, and torch {torch.__version__} has no CUDA that starts here: "
                "install a torch with CUDA (https://pytorch.org/get-started)"
            )


def _imported(module: str, need: str, install: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingBackend(f"{need}, which does not import ({error}): {install}") from error


def clashing() -> str | None:
    """Why the installed packages of onnxruntime conflict; None if they do not.

    Packages in different folders do not: the first folder's module is imported."""
    try:
        folders = {
            Path(str(distribution(name).locate_file(""))).resolve() for name in ("onnxruntime", "onnxruntime-gpu")
        }
    except PackageNotFoundError:
        return None
    if len(folders) > 1:
        return None
    return (
        "onnxruntime and onnxruntime-gpu are both installed, are one module and overwrite each other: "
        "pip uninstall onnxruntime onnxruntime-gpu"
    )


def check_threads(threads: int) -> None:
    """Raise for an invalid number of CPU threads."""
    if not 0 <= threads <= MOST_THREADS:
        raise OptionFault(f"threads is {threads}: expected 0 (one for each core) to {MOST_THREADS}")
