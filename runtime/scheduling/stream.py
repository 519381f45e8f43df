"""Stream: a text that is being written, as its reader sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.admission import Admitted
from spaceport.runtime.scheduling.scheduler import Task
from spaceport.runtime.text.reading import Piece, ThreadText
from spaceport.runtime.trace.trace import Trace

_REQUEST_WIDE: tuple[Ending, ...] = ("cancelled", "deadline", "total")


@dataclass(frozen=True)
class Completion:
    """A finished text."""

    text: str
    tokens: tuple[int, ...]  # in the order in which the text is read
    # "end": end of text; "stop": a stop string; "length": max_tokens or max_seq_len; "total": max_total_tokens, which
    # ends all threads where they are, as "deadline" and "cancelled" do. Each thread has its own; here is the spine's.
    ending: Ending
    statistics: Statistics
    prompt_tokens: tuple[int, ...] = ()
    threads: tuple[ThreadText, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of the tokens, if that was asked for
    seed: int | None = None  # of what was drawn: the same seed, the same text; none: nothing was
    trace: Trace | None = field(default=None, repr=False)  # if one was asked for


class _Text:
    """A task with what it has written."""

    def __init__(self, admitted: Admitted, task: Task) -> None:
        self._admitted = admitted
        self._task = task

    @property
    def statistics(self) -> Statistics:
        """What the text has cost so far."""
        return self._admitted.request.statistics

    def close(self) -> None:
        """End the text where it is, if it has not ended; its slots are free after the step that is under way."""
        self._task.cancelled = True

    def __del__(self) -> None:
        self._task.cancelled = True

    def _completion(self) -> Completion:
        if self._task.fault is not None:
            raise self._task.fault
        request, reading = self._admitted.request, self._admitted.reading
        spine = request.threads[0]
        threads = reading.finished()
        wide = next((thread.ending for thread in threads if thread.ending in _REQUEST_WIDE), None)
        return Completion(
            reading.text,
            reading.tokens(),
            wide or threads[0].ending,
            request.statistics,
            tuple(spine.tokens[: spine.start]),
            threads,
            reading.logprobs(),
            self._admitted.seed,
            self._admitted.trace,
        )


class Stream(_Text):
    """A text under way: iterate for its pieces, then ask for the completion; closing it early ends it."""

    def __init__(self, admitted: Admitted, task: Task, news: SimpleQueue[list[Piece] | None]) -> None:
        super().__init__(admitted, task)
        self._news = news
        self._pieces: deque[Piece] = deque()
        self._over = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._pieces:
            if self._over:
                raise StopIteration
            news = self._news.get()
            if news is None:
                self._over = True
                self._news.put(None)  # for other readers of the same stream
                if self._task.fault is not None:
                    raise self._task.fault
            else:
                self._pieces.extend(news)
        return self._pieces.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole text, run to its end."""
        for _ in self:
            pass
        return self._completion()


class AsyncStream(_Text):
    """The same for asyncio: what is written meanwhile waits in order; leaving the `async with` early ends the text."""

    def __init__(self, admitted: Admitted, task: Task, news: asyncio.Queue[list[Piece] | None]) -> None:
        super().__init__(admitted, task)
        self._news = news
        self._pieces: deque[Piece] = deque()
        self._over = False

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._over:
                raise StopAsyncIteration
            try:
                news = await self._news.get()
            except asyncio.CancelledError:
                self.close()
                raise
            if news is None:
                self._over = True
                self._news.put_nowait(None)  # for other readers of the same stream
                if self._task.fault is not None:
                    raise self._task.fault
            else:
                self._pieces.extend(news)
        return self._pieces.popleft()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def completion(self) -> Completion:
        """The whole text, when it has ended."""
        async for _ in self:
            pass
        return self._completion()


def news_for_loop(
    queue: asyncio.Queue[list[Piece] | None], loop: asyncio.AbstractEventLoop
) -> Callable[[list[Piece] | None], None]:
    """Puts news into a queue of an event loop, from any OS thread."""

    def put(news: list[Piece] | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, news)  # raises once the loop is closed: that ends the text

    return put
