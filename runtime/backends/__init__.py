"""Backends: what can run a compiled graph, and the one place where they are opened."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from spaceport.graphs.contract.faults import InputFault, MissingPart, OptionFault
from spaceport.graphs.contract.manifest import LIBRARIES, Flavour
from spaceport.runtime.backends.built import engine_for
from spaceport.runtime.backends.device import gpu, no_gpu
from spaceport.runtime.backends.opening import Opening
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Engine

MOST_THREADS = 1024  # a mistyped number beyond it would keep the machine busy with nothing but threads


class Backend(NamedTuple):
    """A way to run a bundle."""

    opener: str  # our module
    module: str  # that must be importable
    extra: str  # that brings it
    flavour: Flavour | None = None  # of the engines that it runs; none: it runs the graph itself
    gpu: bool = True


# The best first: that is the one that `auto` takes, if it can run the bundle here.
BACKENDS = {
    "tensorrt": Backend("on_tensorrt", LIBRARIES["tensorrt"], "tensorrt", "tensorrt"),
    "tensorrt-rtx": Backend("on_tensorrt", LIBRARIES["tensorrt-rtx"], "tensorrt-rtx", "tensorrt-rtx"),
    "onnxruntime-cuda": Backend("on_cuda", "onnxruntime", "gpu"),
    "onnxruntime": Backend("on_onnxruntime", "onnxruntime", "cpu", gpu=False),
}


class MissingBackend(MissingPart):
    """No backend is installed, or no device here, that could run the bundle; the message says what to do."""


def open_engine(bundle: Bundle, backend: str, opening: Opening) -> Engine:
    """The bundle as an engine with buffers for as many requests and slots as are asked for."""
    if backend not in ("auto", *BACKENDS):
        raise OptionFault(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")
    check_threads(opening.threads)
    name = best(bundle, opening) if backend == "auto" else backend
    require(bundle, name, opening)
    chosen = BACKENDS[name]
    opener = import_module(f"spaceport.runtime.backends.{chosen.opener}")
    try:
        opened: Engine = opener.open_engine(bundle, opening, *((chosen.flavour,) if chosen.flavour else ()))
    except MemoryError as error:
        gigabytes = bundle.manifest.signature.kv_bytes(opening.requests, opening.capacity) / 1e9
        raise OptionFault(
            f"{gigabytes:.1f} GB of KV buffers for {opening.capacity} slots do not fit into the memory: lower max_seq_len "
            "(--max-seq-len)"
        ) from error
    return opened


def best(bundle: Bundle, opening: Opening) -> str:
    """The first backend that could run the bundle here."""
    return next((name for name in BACKENDS if why_not(bundle, name, opening) is None), [*BACKENDS][-1])


def passed_over(bundle: Bundle, backend: str, opening: Opening) -> tuple[str, ...]:
    """Why `auto` took this backend and none of the better ones; nothing where nobody would expect one of those."""
    better = [*BACKENDS][: [*BACKENDS].index(backend)]
    if no_gpu() is not None and not bundle.manifest.engines:
        return ()
    reasons = {name: reason for name in better if (reason := why_not(bundle, name, opening)) is not None}
    return tuple(f"not {line}" for line in by_reason(reasons))


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason why backends do not run, those that share it together."""
    shared: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        shared.setdefault(reason.removeprefix(f"backend {name} "), []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in shared.items()]


def why_not(bundle: Bundle, backend: str, opening: Opening) -> str | None:
    """Why a backend cannot run the bundle here; nothing if it can."""
    try:
        require(bundle, backend, opening)
    except (MissingPart, InputFault, OptionFault) as error:
        return str(error)
    return None


def require(bundle: Bundle, backend: str, opening: Opening) -> None:
    """Raise if a backend cannot run the bundle here; asked of what is installed and recorded, nothing big is loaded."""
    flavour, signature = BACKENDS[backend].flavour, bundle.manifest.signature
    require_device(backend)
    if flavour is not None and signature.lowering != "append":
        raise InputFault(
            f"{bundle.path}: its graph is scatter-lowered, backend {backend} runs engines of append-lowered graphs: export "
            "it with --lowering append, then `spaceport build` it"
        )
    if flavour is not None:
        engine_for(bundle, flavour, None, gpu().target, opening)
    if backend == "onnxruntime-cuda" and signature.lowering != "scatter":
        raise InputFault(
            f"{bundle.path}: its graph is append-lowered, backend {backend} runs scatter-lowered graphs: export it with "
            "--lowering scatter, or `spaceport build` an engine"
        )
    if backend == "onnxruntime" and signature.dtype == "bfloat16":
        raise InputFault(
            f"{bundle.path}: its graph is in bfloat16, for which backend {backend} has no matrix product: run it on a GPU, "
            "or export it with --dtype float32"
        )
    require_module(backend)


def require_device(backend: str) -> None:
    """Raise if this machine has nothing that a backend could run on."""
    if BACKENDS[backend].gpu and (reason := no_gpu()) is not None:
        raise MissingBackend(f"backend {backend} needs an NVIDIA GPU: {reason}")


def require_module(backend: str) -> None:
    """Raise if a backend's module is not there, or not the one that it needs."""
    module, extra = BACKENDS[backend].module, BACKENDS[backend].extra
    install = f"pip install 'spaceport[{extra}]'"
    if backend == "onnxruntime-cuda" and (clash := clashing()) is not None:
        raise MissingBackend(f"backend {backend} needs onnxruntime-gpu alone: {clash}, then {install}")
    try:
        imported = import_module(module)
    except ImportError as error:
        raise MissingBackend(
            f"backend {backend} needs the package {module}, which does not import ({error}): {install}"
        ) from error
    if backend == "onnxruntime-cuda" and "CUDAExecutionProvider" not in imported.get_available_providers():
        raise MissingBackend(
            f"backend {backend} needs an onnxruntime with CUDA, this one has {', '.join(imported.get_available_providers())}: "
            f"pip uninstall onnxruntime onnxruntime-gpu, then {install}"
        )
    if BACKENDS[backend].flavour is not None:
        require_torch(backend, install)


def require_torch(backend: str, install: str) -> None:
    """Raise if there is no torch that a backend could keep its buffers in."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise MissingBackend(
            f"backend {backend} keeps its buffers in torch, which does not import ({error}): {install}"
        ) from error
    if not torch.cuda.is_available():
        raise MissingBackend(
            f"backend {backend} keeps its buffers in torch, and torch {torch.__version__} has no CUDA that starts here: "
            "install a torch with CUDA (https://pytorch.org/get-started)"
        )


def clashing() -> str | None:
    """Why the packages of onnxruntime that are installed stand in each other's way; nothing if they do not."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            version(package)
        except PackageNotFoundError:
            return None
    return (
        "onnxruntime and onnxruntime-gpu are both installed, are one module and overwrite each other: "
        "pip uninstall onnxruntime onnxruntime-gpu"
    )


def check_threads(threads: int) -> None:
    """Raise for a number of processor threads that cannot be meant."""
    if not 0 <= threads <= MOST_THREADS:
        raise OptionFault(f"threads is {threads}: expected 0 (one for each core) to {MOST_THREADS}")
