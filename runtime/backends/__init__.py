"""Backends: what can run a compiled graph, and the one place where they are opened."""

from __future__ import annotations

from importlib import import_module

from spaceport.graphs.faults import MissingPart, OptionFault
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Engine

# name -> module that must be importable, and the extra that brings it
BACKENDS = {"onnxruntime": ("onnxruntime", "cpu")}
MOST_THREADS = 1024  # a mistyped number beyond it would keep the machine busy with nothing but threads


class MissingBackend(MissingPart):
    """No backend is installed that could run the bundle; the message holds the command that installs one."""


def open_engine(bundle: Bundle, backend: str, capacity: int, requests: int, threads: int) -> Engine:
    """The bundle's graph as an engine with buffers for `requests` requests of `capacity` slots."""
    if backend not in ("auto", *BACKENDS):
        raise OptionFault(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")
    check_threads(threads)
    name = next(iter(BACKENDS)) if backend == "auto" else backend
    module, extra = BACKENDS[name]
    try:
        import_module(module)
    except ImportError as error:
        raise MissingBackend(
            f"backend {name} needs the package {module}, which does not import ({error}): pip install 'spaceport[{extra}]'"
        ) from error
    opener = import_module(f"spaceport.runtime.backends.on_{name}")
    try:
        opened: Engine = opener.open_engine(bundle, capacity, requests, threads)
    except MemoryError as error:
        gigabytes = bundle.manifest.signature.kv_bytes(requests, capacity) / 1e9
        raise OptionFault(
            f"{gigabytes:.1f} GB of KV buffers for {capacity} slots do not fit into the memory: lower max_seq_len (--max-seq-len)"
        ) from error
    return opened


def check_threads(threads: int) -> None:
    """Raise for a number of processor threads that cannot be meant."""
    if not 0 <= threads <= MOST_THREADS:
        raise OptionFault(f"threads is {threads}: expected 0 (one for each core) to {MOST_THREADS}")
