"""Stream: a text that is being written, as its reader sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion, Deliver, Delivery, Generation
from spaceport.runtime.text.piece import Piece


class _Reader:
    """A generation with the pieces that were delivered and not read yet."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces: deque[Piece] = deque()
        self._over = False

    @property
    def statistics(self) -> Statistics:
        """What the text has cost so far."""
        return self._generation.request.statistics

    def close(self) -> None:
        """End the text where it is, if it has not ended; its slots are free after the step that is under way."""
        self._generation.cancelled = True

    def __del__(self) -> None:
        self._generation.cancelled = True

    def _receive(self, delivered: Delivery | None) -> bool:
        """Take a delivery; whether it was the last one."""
        if delivered is not None:
            self._pieces.extend(self._generation.read(delivered))
            return False
        self._over = True
        return True


class Stream(_Reader):
    """A text under way: iterate for its pieces, then ask for the completion; closing it early ends it."""

    def __init__(self, generation: Generation, deliveries: SimpleQueue[Delivery | None]) -> None:
        super().__init__(generation)
        self._reading = Lock()  # deliveries are read one at a time and in their order
        self._deliveries = deliveries

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
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
        """The whole text, run to its end."""
        self._generation.patient = True
        for _ in self:
            pass
        return self._generation.completion()


class AsyncStream(_Reader):
    """The same for asyncio: what is written meanwhile waits in order; leaving the `async with` early ends the text."""

    def __init__(self, generation: Generation, deliveries: asyncio.Queue[Delivery | None]) -> None:
        super().__init__(generation)
        self._deliveries = deliveries

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
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
        """The whole text, when it has ended."""
        self._generation.patient = True
        async for _ in self:
            pass
        return self._generation.completion()


def deliver_to_loop(queue: asyncio.Queue[Delivery | None], loop: asyncio.AbstractEventLoop) -> Deliver:
    """Puts deliveries into a queue of an event loop, from any OS thread."""

    def put(delivered: Delivery | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, delivered)  # raises once the loop is closed: that ends the text

    return put
