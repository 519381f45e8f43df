"""The pieces of a completion while it is generated: views of a request, for OS threads and for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.scheduling.request import Completion, Output, Request
from spaceport.runtime.scheduling.worker import check_process
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.trace import Trace


class _Reader:
    """The reader of a request, with the pieces that it has made but not returned."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._pieces: deque[Piece] = deque()
        self._failed = False  # whether it has raised the error of the request, after which it has no more pieces
        self._process = os.getpid()

    @property
    def statistics(self) -> Statistics:
        """Counts and times of the request so far."""
        return self.request.statistics

    @property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt; empty before the request is prepared."""
        if not self.request.prepared:
            return []
        root = self.request.sequences.threads[0]
        return root.tokens[: root.start]

    @property
    def trace(self) -> Trace | None:
        """What the steps so far did; None without `Decoding.trace`, and before the request is admitted."""
        output = self.request.output
        return output.trace if isinstance(output, Output) else None

    def close(self) -> None:
        """Cancel the request, if it has not ended; its KV slots are free after the current step."""
        self.request.end()

    def __del__(self) -> None:  # at any moment in any OS thread, so it must not wait for a lock
        self.request.drop()

    def _advance(self) -> bool:
        """Make the next pieces; without any, returns whether it is the end, and raises the error of the request once."""
        done = self.request.done  # before reading: what comes before the end is read
        self._pieces.extend(self.request.read())
        if done and not self._pieces and self.request.error is not None and not self._failed:
            self._failed = True
            raise self.request.error
        return done


class Stream(_Reader):
    """A running completion: iterate over its pieces, then call `completion`; closing it early cancels the request."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        changes: SimpleQueue[None] = SimpleQueue()  # wakes a reader in less time than an Event
        self._changes = changes
        self._reading = Lock()  # one OS thread reads at a time, so that the pieces stay in order
        request.on_change = partial(changes.put, None)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        check_process(self._process)
        with self._reading:
            while not self._pieces:
                done = self._advance()
                if self._pieces:
                    break
                if done:
                    raise StopIteration
                self._changes.get()
            return self._pieces.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        self.request.patient = True
        for _ in self:
            pass
        return self.request.completion()


class AsyncStream(_Reader):
    """A running completion for asyncio: unread pieces are queued; leaving the `async with` early cancels the request."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._changed = asyncio.Event()
        loop, changed, timeout = asyncio.get_running_loop(), self._changed, request.decoding.timeout
        # Until the scheduler has the request, only this timer ends it in time.
        timer = None if timeout is None else loop.call_later(timeout, request.end, "deadline")

        def on_change() -> None:
            changed.set()
            if timer is not None and (request.prepared or request.done):
                timer.cancel()

        def on_change_anywhere() -> None:
            loop.call_soon_threadsafe(on_change)  # raises once the loop is closed, which ends the request

        request.on_change = on_change_anywhere  # holds no stream: one that nobody holds cancels its request

    async def submitted(self) -> None:
        """Wait until the prompt is tokenized and the request is in the queue; raises the error of an invalid request."""
        while True:
            self._changed.clear()
            if self.request.prepared or self.request.done:
                break
            await self._change()
        if not self.request.prepared and self.request.error is not None:
            raise self.request.error

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        check_process(self._process)
        while not self._pieces:
            self._changed.clear()
            done = self._advance()
            if self._pieces:
                break
            if done:
                raise StopAsyncIteration
            await self._change()
        return self._pieces.popleft()

    async def pieces(self) -> list[Piece]:
        """The next pieces that have come, those of one step or of several; empty at the end."""
        try:
            pieces = [await anext(self)]
        except StopAsyncIteration:
            return []
        pieces.extend(self._pieces)
        self._pieces.clear()
        return pieces

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def completion(self) -> Completion:
        """Wait for the end and return the completion."""
        self.request.patient = True
        async for _ in self:
            pass
        return self.request.completion()

    async def _change(self) -> None:
        """Wait for a change of the request; a cancelled wait cancels the request."""
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.close()
            raise
