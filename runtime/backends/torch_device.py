"""Device: GPU memory, one stream and CUDA graphs, through torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Device(Protocol):
    """The GPU functions that an engine needs; all work goes to one stream, in order."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""

    def host(self, size: int) -> torch.Tensor:
        """Pinned host memory."""

    def working(self) -> AbstractContextManager[None]:
        """A context in which torch's work goes to the stream."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` as a CUDA graph; returns the function that replays it."""

    def wait(self) -> None:
        """Wait until the stream is idle."""

    def release_cached(self) -> None:
        """Release cached GPU memory."""


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
        # Other threads may use the GPU meanwhile; only the work of this one is captured.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        self._stream.synchronize()

    def release_cached(self) -> None:
        torch.cuda.empty_cache()
