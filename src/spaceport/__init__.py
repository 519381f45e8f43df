"""Spaceport: self-speculative decoding for language models on ONNX Runtime and TensorRT.

    from spaceport import Decoding, Runtime, TrainingSettings, export, tune

Also every other name of `spaceport.runtime`; each is imported when it is first used. `__init__.pyi` has their types.
"""

import logging
import os
from importlib import import_module

# ONNX Runtime reads it when it is imported. Without it, version 1.29 and later store an id of the machine and send names
# and hashes of models to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

logging.getLogger("spaceport").addHandler(logging.NullHandler())  # silent unless a program configures logging

__version__ = "0.1.0"

_PLACES = {
    "TrainingSettings": "spaceport.training.settings",
    "export": "spaceport.tools.exporting",
    "tune": "spaceport.training.tuning",
}


def _public_names() -> list[str]:
    return sorted((*_PLACES, *import_module("spaceport.runtime").__all__))


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _public_names()
    if name.startswith("_") or name not in _public_names():
        raise AttributeError(f"module 'spaceport' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_PLACES.get(name, "spaceport.runtime")), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})
