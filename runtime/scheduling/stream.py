"""Stream: the pieces of a completion while it is generated."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion, Deliver, Delivery, Generation
from spaceport.runtime.scheduling.worker import check_process
from spaceport.runtime.text.piece import Piece


class _Reader:
    """A generation with its delivered, unread pieces."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces: deque[Piece] = deque()
        self._over = False
        self._process = os.getpid()

    @property
    def statistics(self) -> Statistics:
        """Counts and times of the request so far."""
        return self._generation.request.statistics

    def close(self) -> None:
        """Cancel the request, if it has not ended; its KV slots are free after the current step."""
        self._generation.cancelled = True

    def __del__(self) -> None:
        self._generation.cancelled = True

    def _receive(self, delivered: Delivery | None) -> bool:
        """Store the pieces of a delivery; returns whether it was the last one."""
        if delivered is not None:
            self._pieces.extend(self._generation.read(delivered))
            return False
        self._over = True
        return True


class Stream(_Reader):
    """A running completion: iterate over its pieces, then call `completion`; closing it early cancels the request."""

    def __init__(self, generation: Generation, deliveries: SimpleQueue[Delivery | None]) -> None:
        super().__init__(generation)
        self._reading = Lock()  # deliveries are read one at a time, in order
        self._deliveries = deliveries

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        check_process(self._process)
        with self._reading:
            while not self._pieces:
                if self._over:
                    raise StopIteration
                if self._receive(self._deliveries.get()) and self._generation.fault is not None:
                    raise self._generation.fault
            return self._pieces.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        self._generation.patient = True
        for _ in self:
            pass
        return self._generation.completion()


class AsyncStream(_Reader):
    """A running completion for asyncio: unread pieces are queued; leaving the `async with` early cancels the request."""

    def __init__(self, generation: Generation, deliveries: asyncio.Queue[Delivery | None]) -> None:
        super().__init__(generation)
        self._deliveries = deliveries

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        check_process(self._process)
        while not self._pieces:
            if self._over:
                raise StopAsyncIteration
            try:
                delivered = await self._deliveries.get()
            except asyncio.CancelledError:
                self.close()
                raise
            if self._receive(delivered):
                self._deliveries.put_nowait(None)  # for other readers of the same stream
                if self._generation.fault is not None:
                    raise self._generation.fault
        return self._pieces.popleft()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        self._generation.patient = True
        async for _ in self:
            pass
        return self._generation.completion()


def deliver_to_loop(queue: asyncio.Queue[Delivery | None], loop: asyncio.AbstractEventLoop) -> Deliver:
    """A function that puts deliveries into a queue of an event loop, from any OS thread."""

    def put(delivered: Delivery | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, delivered)  # raises once the loop is closed, which ends the request

    return put
