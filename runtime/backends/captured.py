"""Captured: calls that come again, kept as graphs that a GPU starts at once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

Work = Callable[[], None]

_MOST = 256  # graphs: each holds some megabytes of the device
_MOST_SEEN = 4096  # calls that are counted
_FIRST = 2  # the time at which a call is captured: one that never comes again is not worth it


class Captured:
    """Graphs by what they do; the least recently used one goes first."""

    def __init__(self, capture: Callable[[Work], Work], most: int = _MOST) -> None:
        self._capture = capture
        self._most = most
        self._graphs: OrderedDict[Hashable, Work] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()

    def play(self, key: Hashable, plain: Work, prepare: Work) -> None:
        """Do what a key stands for: by its graph, if there is one, else plainly, `prepare` first."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
            return
        prepare()
        plain()  # before it is captured, too: what TensorRT does once for new shapes is not to be in a graph
        self._seen[key] += 1
        if self._seen[key] >= _FIRST and self._most:
            self._graphs[key] = self._capture(plain)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
        elif len(self._seen) > _MOST_SEEN:
            self._seen.clear()

    def __len__(self) -> int:
        return len(self._graphs)
