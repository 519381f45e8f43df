"""Backends: what can run a compiled graph, and the one place where they are opened."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from spaceport.graphs.faults import MissingPart, OptionFault
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Engine

# name -> module that must be importable, and the extra that brings it
BACKENDS = {"onnxruntime": ("onnxruntime", "cpu")}


class MissingBackend(MissingPart):
    """No backend is installed that could run the bundle; the message holds the command that installs one."""


def open_engine(bundle: Bundle, backend: str, capacity: int, requests: int, threads: int) -> Engine:
    """The bundle's graph as an engine with buffers for `requests` requests of `capacity` slots."""
    if backend not in ("auto", *BACKENDS):
        raise OptionFault(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")
    name = next(iter(BACKENDS)) if backend == "auto" else backend
    module, extra = BACKENDS[name]
    if find_spec(module) is None:
        raise MissingBackend(
            f"backend {name} needs the package {module}, which is not installed: pip install 'spaceport[{extra}]'"
        )
    opened: Engine = import_module(f"spaceport.runtime.backends.on_{name}").open_engine(
        bundle, capacity, requests, threads
    )
    return opened
