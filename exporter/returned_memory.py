"""Returned memory: memory of freed arrays that goes back to the system."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc
_LARGE = 1 << 21  # bytes; above the parts of weights that are computed together, which use the same memory again


def return_large_arrays() -> None:
    """Allocate arrays of 2 MB and more each in memory of its own, from now on.

    By default, glibc raises its limit up to 32 MB. Layers then leave gaps between small tensors that stay: an export
    of 0.57 billion parameters with int8 layers reached 1.0 GB instead of 0.64 GB. Other C libraries are not changed."""
    if sys.platform.startswith("linux"):
        change = getattr(ctypes.CDLL(None), "mallopt", None)
        if change is not None:
            change(_MMAP_THRESHOLD, _LARGE)


def return_free_memory() -> None:
    """Return the memory between small arrays that stay: 0.25 GB for 40 layers that were rounded one after the other."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
