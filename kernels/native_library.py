"""The compiled library of native operators: where it is, and how a session gets it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

from spaceport.kernels.build import library_name

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

DOMAIN = "spaceport"
VERSION = 2  # of DOMAIN, which graphs import; raised when an older library would compute something else

_NAMES_BYTES = 256


def library_path() -> Path | None:
    """The library beside this file, or None where none was compiled."""
    path = Path(__file__).parent / library_name()
    return path if path.is_file() else None


def register(options: SessionOptions, library: Path, needed: int = VERSION) -> None:
    """Let a session run the operators of a library; without it, it runs the functions of the same names.

    `needed` is the version of the domain that the graph imports.
    """
    if (reason := fault(library, needed)) is not None:
        raise ValueError(reason)
    options.register_custom_ops_library(str(library))


def fault(library: Path, needed: int = VERSION) -> str | None:
    """Why a library cannot run a graph that imports this version of the domain; None if it can."""
    try:
        has = version(library)
    except OSError as error:
        return f"the native operators in {library} cannot be loaded: {error}"
    if has < needed:
        return (
            f"the native operators in {library} have version {has}, expected {needed} or newer: "
            "install Spaceport again, in the version that exported the bundle or a newer one"
        )
    if not instruction_set(library):
        return (
            f"SPACEPORT_KERNELS is {os.environ.get('SPACEPORT_KERNELS')}: this processor has "
            f"{', '.join(instruction_sets(library))}; name one of them, or unset it"
        )
    return None


def version(library: Path) -> int:
    """The newest version of the domain that a library can run; 0 for a file without one."""
    function = getattr(ctypes.CDLL(str(library)), "spaceport_kernels_version", None)
    return 0 if function is None else int(function())


def instruction_set(library: Path) -> str:
    """The name of the instruction set that sessions opened now use; empty if SPACEPORT_KERNELS names an unknown one."""
    name = ctypes.CDLL(str(library)).spaceport_instruction_set
    name.restype = ctypes.c_char_p
    return str(name().decode())


def instruction_sets(library: Path) -> list[str]:
    """The names of the instruction sets that this processor has, the fastest first."""
    function = ctypes.CDLL(str(library)).spaceport_instruction_sets
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), None
    names = ctypes.create_string_buffer(_NAMES_BYTES)
    function(names, len(names))
    return names.value.decode().split(", ")
