"""Memory of an engine, on huge pages where these make steps faster, and the return of memory to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

_HUGE_PAGE = 2**21  # bytes, on x86 and on ARM with pages of 4 KiB
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MANY_BYTES = 32_000_000  # of weights: fewer stay in the CPU's caches
_READ = 2**24  # bytes that are read at a time
LONG = 1024  # visible slots from which huge pages are worth their space


def return_freed_memory() -> None:
    """Return free memory to the system; glibc keeps it while any block behind it is in use."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def copying_pays(weights: int) -> bool:
    """Whether so many bytes of weights are read faster from huge pages, which this system has, and fit into its memory."""
    return weights >= _MANY_BYTES and _has_huge_pages() and weights <= _available() // 2


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _SETTING.read_text("utf-8")
    except OSError:
        return False


def _available() -> int:
    """Bytes of memory that this process may still take."""
    available = 0
    with suppress(OSError, ValueError):
        for line in _MEMORY.read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):  # of a container
        available = min(available, int(_LIMIT.read_text("utf-8")))
    return available


def copied_file(descriptor: int) -> NDArray[np.uint8]:
    """The content of a file in memory of its own, on huge pages if the system has them.

    Pages of 4 KiB, as the cache of files often has them, cost a third more time in a virtual machine when all weights
    are read in each step.
    """
    size = os.fstat(descriptor).st_size
    try:
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # not enough memory or addresses
        raise MemoryError(f"{size} bytes of weights") from error
    if sys.platform == "linux":
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    content = whole[-whole.ctypes.data % _HUGE_PAGE :][:size]
    read = 0
    while read < size:
        count = os.preadv(descriptor, [content[read : read + _READ].data], read)
        if not count:
            raise EOFError(f"it ends after {read} of {size} bytes")
        read += count
    return content


class KvMemory:
    """Zeroed memory of layers x requests x heads x slots x values, on pages of 4 KiB.

    numpy asks for huge pages, of which the first write takes and clears 2 MiB. In a model of 135 million parameters each
    layer and request has 3 MiB of keys, of which a text of 256 tokens uses a sixteenth.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        size = prod(shape) * np.dtype(dtype).itemsize
        try:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:  # not enough memory or addresses
            raise MemoryError(f"{size} bytes of KV buffers") from error
        if sys.platform == "linux":
            with suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.array: NDArray[np.generic] = np.frombuffer(self._map, dtype, prod(shape)).reshape(shape)
        self._long: dict[int, int] = {}  # slots of a request that have huge pages, or will have them after more calls
        self._small: deque[tuple[int, int]] = deque()  # layers and requests whose slots do not have them yet

    def use_huge_pages(self, first: int, requests: int, visible: int) -> None:
        """Move the slots of requests with long texts to huge pages, which are read faster, if the system can do that.

        Each call moves one layer of one request: moving all at once would take longer than a step.
        """
        for request in range(first, first + requests):
            if visible > self._long.get(request, LONG):
                self._long[request] = 2 * visible
                self._small.extend((layer, request) for layer in range(len(self.array)))
        if self._small:
            layer, request = self._small.popleft()
            for head in self.array[layer, request]:
                self._move(head[: self._long[request]])

    def _move(self, part: NDArray[np.generic]) -> None:
        """Move a contiguous part of the array, and what shares its pages."""
        offset = part.ctypes.data - self.array.ctypes.data
        start = offset // _HUGE_PAGE * _HUGE_PAGE
        end = min(-(-(offset + part.nbytes) // _HUGE_PAGE) * _HUGE_PAGE, len(self._map))
        if sys.platform == "linux":
            with suppress(OSError):  # an older system, or no free huge page
                self._map.madvise(mmap.MADV_HUGEPAGE, start, end - start)
                self._map.madvise(_COLLAPSE, start, end - start)
