"""Buffers: the free KV buffers of an engine, by their index."""

from __future__ import annotations

from heapq import heappop, heappush

from spaceport.runtime.engine import Engine


class FreeBuffers:
    """The KV buffers that no request uses."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # heap of indices
        self._spoilt: set[int] = set()  # free indices whose buffers may hold NaN, to be cleared before they are used

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The index of the buffers that the next request gets: the lowest one, so that calls have few idle requests."""
        return heappop(self._free)

    def prepare(self, engine: Engine, index: int) -> None:
        """Make taken buffers usable; raises the engine's error."""
        if index in self._spoilt:
            engine.clear(index)
            self._spoilt.remove(index)

    def release(self, index: int, spoilt: bool) -> None:
        """Take back the buffers of a request that has ended; `spoilt`: they may hold NaN."""
        if spoilt:
            self._spoilt.add(index)
        heappush(self._free, index)
