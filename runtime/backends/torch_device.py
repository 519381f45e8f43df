"""Device: a GPU's memory, its one stream and its graphs, by way of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Device(Protocol):
    """What an engine needs of a GPU; all its work goes to one stream, in order."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""

    def host(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device copies from and to by itself."""

    def working(self) -> AbstractContextManager[None]:
        """A context within which torch's work goes to the stream."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` puts on the stream, as one thing to put there again; it is not done yet."""

    def wait(self) -> None:
        """Until all that is on the stream is done."""

    def give_back(self) -> None:
        """Leave what nothing holds any more to others than torch, which keeps it for itself."""


class Cuda:
    """The first GPU of the process."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU meanwhile; only what this one does is captured.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        self._stream.synchronize()

    def give_back(self) -> None:
        torch.cuda.empty_cache()
