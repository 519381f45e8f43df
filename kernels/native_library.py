"""The compiled library of native operators: where it is, and how a session gets it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from spaceport.kernels.build import library_name

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

DOMAIN = "spaceport"


def library_path() -> Path | None:
    """The library beside this file, or None where none was compiled."""
    path = Path(__file__).parent / library_name()
    return path if path.is_file() else None


def register(options: SessionOptions, library: Path) -> None:
    """Let a session run the operators of a library; without it, it runs the functions of the same names."""
    options.register_custom_ops_library(str(library))


def instruction_set(library: Path) -> str:
    """The name of the instruction set that sessions opened now use; empty if SPACEPORT_KERNELS names an unknown one."""
    name = ctypes.CDLL(str(library)).spaceport_instruction_set
    name.restype = ctypes.c_char_p
    return str(name().decode())
