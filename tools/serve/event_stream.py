"""Event stream: a response of server-sent events that ends when its client leaves or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from spaceport.tools.serve.failures import failure_of
from spaceport.tools.serve.request_record import record_in

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


class EventStream:
    """A response that sends events as they come, and comments while none come; an error is its last event."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], ping: float, send_timeout: float
    ) -> None:
        self._events = events
        self._close = close  # also called if no event was ever asked for
        self._ping = ping
        self._send_timeout = send_timeout
        self._next: asyncio.Task[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for chunk in self._chunks(gone, scope):
                message = {"type": "http.response.body", "body": chunk, "more_body": True}
                await asyncio.wait_for(send(message), self._send_timeout)
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):  # the client does not read, or its connection broke
            return
        finally:
            gone.cancel()
            if self._next is not None:
                self._next.cancel()
                with suppress(BaseException):
                    await self._next
            await self._events.aclose()
            self._close()

    async def _chunks(self, gone: asyncio.Task[None], scope: Scope) -> AsyncGenerator[bytes, None]:
        """The events, pings while there are none, and an error as the last event."""
        while True:
            if self._next is None:
                self._next = asyncio.ensure_future(anext(self._events))
            done, _ = await asyncio.wait({self._next, gone}, timeout=self._ping, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                return
            if not done:
                yield _PING
                continue
            ready, self._next = self._next, None
            try:
                yield ready.result()
            except StopAsyncIteration:
                return
            except Exception as error:  # noqa: BLE001  (reported to the client)
                failure = failure_of(error)
                if (record := record_in(scope)) is not None:
                    record.error = failure.code or failure.kind
                yield event(failure.body())
                yield DONE
                return


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
