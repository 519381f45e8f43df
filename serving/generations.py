"""The running completions of a request, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.trace import GrowingTrace
from spaceport.serving.answers import ChatAnswer, TextAnswer, counts_of, usage_of
from spaceport.serving.bodies import StreamOptions
from spaceport.serving.request_log import recorded_failure

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# Called once for each choice with its index, its completion and statistics; None: it was ended before it was complete.
OnEnd = Callable[[int, Completion | None, Statistics], None]


def event(content: Any) -> bytes:
    """An event with this content as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class Generations:
    """The running completions of one request: as many choices for each prompt as there are options."""

    def __init__(
        self, runtime: Runtime, prompts: Sequence[Prompt], decodings: Sequence[Decoding], on_end: OnEnd
    ) -> None:
        self._runtime = runtime
        self._on_end = on_end
        self.prompts, self.decodings = prompts, decodings
        self.streams: list[AsyncStream] = []
        self.completions: dict[int, Completion] = {}
        self._open: list[tuple[int, AsyncStream]] = []
        self._growing: dict[int, GrowingTrace] = {}

    async def submit(self) -> None:
        """Submit all completions; raises the error of an invalid request or a full queue, and then none runs.

        The further choices of a prompt get its tokens, so that it is rendered and tokenized once.
        """
        first, *others = self.decodings
        leads: list[AsyncStream] = []
        try:
            leads.extend(self._runtime.astream(prompt, first) for prompt in self.prompts)
            for lead, prompt in zip(leads, self.prompts, strict=True):
                self.streams.append(lead)
                await lead.submitted()
                tokens = lead.prompt_tokens or prompt  # without tokens, its time is over
                self.streams += [self._runtime.astream(tokens, decoding) for decoding in others]
                await asyncio.sleep(0)  # the choices of a prompt take milliseconds
            for stream in self.streams:
                await stream.submitted()
        except BaseException:
            for stream in (*leads, *self.streams):
                stream.close()
            raise
        self._open = list(enumerate(self.streams))

    def close(self) -> None:
        """Cancel the completions that have not ended."""
        streams, self._open = self._open, []
        for index, stream in streams:
            stream.close()
            self._on_end(index, self.completions.get(index), stream.statistics)

    @property
    def statistics(self) -> list[Statistics]:
        """Counts and times of each completion so far."""
        return [stream.statistics for stream in self.streams]

    @property
    def usage(self) -> dict[str, Any]:
        """Usage so far; the choices of one prompt share its tokens."""
        return usage_of(self.statistics, len(self.decodings))

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of an answer with its counts and times so far."""
        return counts_of(self.statistics, len(self.decodings))

    def new_steps(self, index: int) -> dict[str, Any] | None:
        """The steps of a choice since the last call, as data of its trace; None without new ones or without a trace."""
        trace = self.streams[index].trace
        if trace is None:
            return None
        if index not in self._growing:
            self._growing[index] = GrowingTrace(trace, self._runtime.tokenizer)
        return self._growing[index].fresh()

    async def whole(self) -> list[Completion]:
        """All completions, once they have ended."""
        tasks = [asyncio.ensure_future(stream.completion()) for stream in self.streams]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self.completions = dict(enumerate(completions))
        return completions

    async def pieces(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """The index of a choice with its next pieces, which one step generated; no pieces at its end."""
        if len(self.streams) == 1:  # needs neither a queue nor a task, which cost as much as the text of a step
            (only,) = self.streams
            while pieces := await only.pieces():
                yield 0, pieces
            self.completions[0] = await only.completion()
            yield 0, []
            return
        async for index, pieces in self._pieces_of_all():
            yield index, pieces

    async def _pieces_of_all(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """The next pieces of several choices as they come."""
        queue: asyncio.Queue[tuple[int, list[Piece] | Exception]] = asyncio.Queue(maxsize=len(self.streams))

        async def read(index: int, stream: AsyncStream) -> None:
            try:
                while pieces := await stream.pieces():
                    await queue.put((index, pieces))
                self.completions[index] = await stream.completion()
                await queue.put((index, []))
            except Exception as error:  # noqa: BLE001  (raised to the reader of the pieces)
                await queue.put((index, error))

        tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(self.streams)]
        try:
            running = len(self.streams)
            while running:
                index, pieces = await queue.get()
                if isinstance(pieces, Exception):
                    raise pieces
                running -= not pieces
                yield index, pieces
        finally:
            for task in tasks:
                task.cancel()


async def events_of(running: Generations, answer: ChatAnswer | TextAnswer) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; the completions end with it.

    Events that come at the same time are sent together, so that a client wakes up once for them.
    """
    options = answer.body.stream_options or StreamOptions()
    opened: set[int] = set()
    unsent: list[bytes] = []
    try:
        async for index, pieces in running.pieces():
            if index not in opened:
                opened.add(index)
                if (choice := answer.opening(index)) is not None:
                    unsent.append(event(answer.event(choice)))
            choice = answer.delta(index, pieces, running.new_steps(index)) if pieces else answer.rest(index)
            if choice is not None:
                usage = {"usage": running.usage} if options.continuous_usage_stats else {}
                unsent.append(event(answer.event(choice, **usage)))
            if not pieces:
                unsent.append(event(answer.event(answer.ending(index, running.completions[index]))))
            if unsent and len(running.completions) < len(running.streams):
                yield b"".join(unsent)
                unsent.clear()
        if options.include_usage:
            unsent.append(event(answer.event(**running.counts)))
        yield b"".join([*unsent, DONE])
    finally:
        running.close()


async def left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response that sends events as they come, and comments while none come; an error is its last event."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], ping: float, send_timeout: float
    ) -> None:
        self._events = events
        self._close = close  # also called if no event was ever asked for
        self._ping = ping
        self._send_timeout = send_timeout
        self._sent = 0.0  # when the last part was sent, in the time of the event loop
        self._sending: float | None = None  # since when a part waits for the client to read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent = asyncio.get_running_loop().time()
        gone, sender = asyncio.create_task(left(receive)), asyncio.create_task(self._send_all(scope, send))
        try:
            await self._watch({gone, sender}, send)
            if sender.done():
                sender.result()
        except (asyncio.TimeoutError, OSError):  # the client does not read, or its connection broke
            return
        finally:
            gone.cancel()
            sender.cancel()
            with suppress(BaseException):
                await sender
            await self._events.aclose()
            self._close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        """Send the events, and an error as the last one: in one task, since one for each event costs more than its text."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        more = True
        while more:
            try:
                chunk = await anext(self._events)
            except StopAsyncIteration:
                break
            except Exception as error:  # noqa: BLE001  (reported to the client)
                await self._send(event(recorded_failure(error, scope).body()), send)
                chunk, more = DONE, False
            await self._send(chunk, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, chunk: bytes, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sending = clock()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending, self._sent = None, clock()

    async def _watch(self, running: set[asyncio.Task[None]], send: Send) -> None:
        """Return when the client has left or does not read, or all was sent; until then, send comments while no events come."""
        clock = asyncio.get_running_loop().time
        while True:
            due = self._sent + self._ping if self._sending is None else self._sending + self._send_timeout
            timeout = max(0.0, due - clock())
            done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self._sending is not None and clock() >= self._sending + self._send_timeout:
                return
            if self._sending is None and clock() >= self._sent + self._ping:
                message = {"type": "http.response.body", "body": _PING, "more_body": True}
                await asyncio.wait_for(send(message), self._send_timeout)
                self._sent = clock()
