"""Stream: the pieces of a completion while it is generated."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion, Deliver, Delivery, Generation, not_submitted
from spaceport.runtime.scheduling.submission import Submission
from spaceport.runtime.scheduling.worker import check_process
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.trace.trace import Trace


class _Reader:
    """A request with its delivered, unread pieces."""

    def __init__(self, submission: Submission[Generation]) -> None:
        self._submission = submission
        self._pieces: deque[Piece] = deque()
        self._over = False
        self._process = os.getpid()

    @property
    def statistics(self) -> Statistics:
        """Counts and times of the request so far."""
        task = self._submission.task
        return Statistics() if task is None else task.request.statistics

    @property
    def trace(self) -> Trace | None:
        """What the steps so far did; None without `Decoding.trace`, and before the request is admitted."""
        task = self._submission.task
        return None if task is None else task.trace

    def close(self) -> None:
        """Cancel the request, if it has not ended; its KV slots are free after the current step."""
        self._submission.cancel()

    def __del__(self) -> None:  # at any moment in any OS thread, so it must not wait for a lock
        self._submission.cancelled = True
        if self._submission.task is not None:
            self._submission.task.cancelled = True

    def _receive(self, delivered: Delivery | None) -> bool:
        """Store the pieces of a delivery; returns whether it was the last one."""
        if delivered is not None:
            self._pieces.extend(self._submission.submitted.read(delivered))
            return False
        self._over = True
        return True

    def _completion(self) -> Completion:
        """The completion, after all pieces were read."""
        ending = self._submission.ending
        return self._submission.submitted.completion() if ending is None else not_submitted(ending)


class Stream(_Reader):
    """A running completion: iterate over its pieces, then call `completion`; closing it early cancels the request."""

    def __init__(self, submission: Submission[Generation], deliveries: SimpleQueue[Delivery | None]) -> None:
        super().__init__(submission)
        self._over = submission.ending is not None
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
                if self._receive(self._deliveries.get()) and self._submission.submitted.fault is not None:
                    raise self._submission.submitted.fault
            return self._pieces.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        if self._submission.task is not None:
            self._submission.task.patient = True
        for _ in self:
            pass
        return self._completion()


class AsyncStream(_Reader):
    """A running completion for asyncio: unread pieces are queued; leaving the `async with` early cancels the request."""

    def __init__(
        self,
        submission: Submission[Generation],
        deliveries: asyncio.Queue[Delivery | None],
        settled: asyncio.Event,  # set when the request was submitted, failed or ended
        discard: Callable[[Submission[Generation]], None],  # gives up a request that ended before it was submitted
    ) -> None:
        super().__init__(submission)
        self._deliveries = deliveries
        self._settled = settled
        self._discard = discard

    def close(self) -> None:
        """Cancel the request, if it has not ended; its KV slots are free after the current step."""
        super().close()
        self._discard(self._submission)

    async def submitted(self) -> None:
        """Wait until the prompt is tokenized and the request is in the queue; raises the error of an invalid request."""
        if not self._submission.settled:
            try:
                await self._settled.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        if self._submission.fault is not None:
            raise self._submission.fault

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        check_process(self._process)
        await self.submitted()
        while not self._pieces:
            if self._over or self._submission.ending is not None:
                raise StopAsyncIteration
            try:
                delivered = await self._deliveries.get()
            except asyncio.CancelledError:
                self.close()
                raise
            if self._receive(delivered):
                self._deliveries.put_nowait(None)  # for other readers of the same stream
                if self._submission.submitted.fault is not None:
                    raise self._submission.submitted.fault
        return self._pieces.popleft()

    async def pieces(self) -> list[Piece]:
        """The next pieces that have come, those of one step or of several; empty at the end."""
        try:
            found = [await anext(self)]
        except StopAsyncIteration:
            return []
        found.extend(self._pieces)
        self._pieces.clear()
        return found

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        await self.submitted()
        if self._submission.task is not None:
            self._submission.task.patient = True
        async for _ in self:
            pass
        return self._completion()


def settled_event(
    loop: asyncio.AbstractEventLoop, timers: Sequence[asyncio.TimerHandle] = ()
) -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of an event loop, and a function that sets it and stops the timers, from any OS thread."""
    event = asyncio.Event()

    def settle() -> None:
        event.set()
        for timer in timers:
            timer.cancel()

    def settle_in_loop() -> None:
        loop.call_soon_threadsafe(settle)

    return event, settle_in_loop


def deliver_to_loop(queue: asyncio.Queue[Delivery | None], loop: asyncio.AbstractEventLoop) -> Deliver:
    """A function that puts deliveries into a queue of an event loop, from any OS thread."""

    def put(delivered: Delivery | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, delivered)  # raises once the loop is closed, which ends the request

    return put
