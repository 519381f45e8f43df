"""KV memory: zeroed memory of which only the used pages take space; parts in long use get huge pages."""

from __future__ import annotations

import mmap
import sys
from collections import deque
from contextlib import suppress
from math import prod

import numpy as np
from numpy.typing import DTypeLike, NDArray

_HUGE_PAGE = 2**21  # bytes, on x86 and on ARM with pages of 4 KiB
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
LONG = 1024  # visible slots from which huge pages are worth their space


class KvMemory:
    """Zeroed memory of a shape, on pages of 4 KiB.

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

    def use_huge_pages(self, kv: NDArray[np.generic], first: int, requests: int, visible: int) -> None:
        """Move the slots of requests with long texts to huge pages, which are read faster, if the system can do that.

        `kv` is the array as layers x requests x heads x slots x values. Each call moves one layer of one request: moving all
        at once would take longer than a step.
        """
        for request in range(first, first + requests):
            if visible > self._long.get(request, LONG):
                self._long[request] = 2 * visible
                self._small.extend((layer, request) for layer in range(len(kv)))
        if self._small:
            layer, request = self._small.popleft()
            for head in kv[layer, request]:
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
