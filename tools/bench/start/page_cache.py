"""Page cache: remove files from the system's memory, so that they are read from their disk again."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from spaceport.graphs.contract.faults import OptionFault


def drop(folder: Path) -> None:
    """Remove all files below a folder from the page cache; raises if the system keeps a part of one."""
    for file in _files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if cached_share(file):
            raise OptionFault(
                f"{file}: stays in the page cache, so reading it from its disk cannot be measured: expected a file that no "
                "process has mapped, on a disk; leave cold out of --page-cache"
            )


def read(folder: Path) -> None:
    """Read all files below a folder, after which they are in the page cache if it has space for them."""
    for file in _files(folder):
        with file.open("rb") as stream:
            while stream.read(1 << 20):
                pass


def cached_share(file: Path) -> float:
    """The share of a file's pages that are in memory."""
    size = file.stat().st_size
    if not size:
        return 0.0
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)  # bit 0: in memory
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        library = ctypes.CDLL(None, use_errno=True)
        if library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed", str(file))
    return float(np.mean(pages & 1))


def _files(folder: Path) -> Iterable[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())
