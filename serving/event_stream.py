"""A response as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from spaceport.serving.request_log import recorded_failure

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: Any) -> bytes:
    """An event with this content as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class EventStream:
    """A response that sends events as they come, and comments while none come; an error is its last event."""

    events: AsyncGenerator[bytes, None]
    close: Callable[[], None]  # called at least once
    ping: float  # seconds until a comment
    send_timeout: float  # seconds that a client may take to read a part
    _sent: float = 0.0  # when the last part was sent, in the time of the event loop
    _sending: float | None = None  # since when a part waits for the client to read

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
            await self.events.aclose()
            self.close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        """Send the events, and an error as the last one: in one task, since one for each event costs more than its text."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        more = True
        while more:
            try:
                chunk = await anext(self.events)
            except StopAsyncIteration:
                break
            except Exception as error:  # noqa: BLE001  (reported to the client)
                await self._send(event(recorded_failure(error, scope).body()), send)
                chunk, more = DONE, False
            await self._send(chunk, send)
        self.close()  # before the client has all and asks for the metrics
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
            due = self._sent + self.ping if self._sending is None else self._sending + self.send_timeout
            timeout = max(0.0, due - clock())
            done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self._sending is not None and clock() >= self._sending + self.send_timeout:
                return
            if self._sending is None and clock() >= self._sent + self.ping:
                message = {"type": "http.response.body", "body": _PING, "more_body": True}
                await asyncio.wait_for(send(message), self.send_timeout)
                self._sent = clock()
