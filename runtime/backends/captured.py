"""CUDA graphs of calls with frequent shapes, least recently used first to go."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

Work = Callable[[], None]

_MOST = 256  # graphs; each takes some megabytes of GPU memory
_MOST_SEEN = 4096  # shapes that are counted
_FIRST = 2  # the call of a shape that is captured: many shapes come only once


class Captured:
    """CUDA graphs by key; the least recently used one is dropped first."""

    def __init__(self, capture: Callable[[Work], Work], most: int = _MOST) -> None:
        self._capture = capture
        self._most = most
        self._graphs: OrderedDict[Hashable, Work] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()

    def play(self, key: Hashable, plain: Work, prepare: Work) -> None:
        """Run the work of a key: replay its graph, or call `prepare` and `plain`."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
            return
        prepare()
        plain()  # also before the capture: a graph must not contain what TensorRT does once for a new shape
        self._seen[key] += 1
        if self._seen[key] >= _FIRST and self._most:
            self._graphs[key] = self._capture(plain)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
        elif len(self._seen) > _MOST_SEEN:
            self._seen.clear()

    def __len__(self) -> int:
        return len(self._graphs)
