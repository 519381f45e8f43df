"""Proxy: a layer of Ray's HTTP proxies that sends a request again whose replica died, or ends its stream with an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spaceport.serving.event_stream import DONE, event
from spaceport.serving.failures import RETRY, Failure

_MOST_TRIES = 3  # a request that ends each replica that gets it ends no more
_MOST_BYTES = 4 << 20  # of a body that may be sent again, as most_bytes of ServiceOptions
_OF_RAY = (408, 429, 503)  # statuses that the proxy itself answers with, as text

log = logging.getLogger("ray.serve")


def layers() -> list[Middleware]:
    """What each proxy calls when it starts, as RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH says."""
    return [Middleware(ResendRequests)]


class ResendRequests:
    """An application that answers each request although replicas of the one that it calls may die.

    Ray's proxy returns without a response if the replica died before the response began, and in the middle of one later.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = ForwardedRequest(receive, send)
        for further in reversed(range(_MOST_TRIES)):
            exchange.read = 0
            await self._app(dict(scope), exchange.receive, exchange.send)
            if exchange.started or exchange.gone or exchange.too_long:
                break
            if further:
                log.warning("the replica of a request died before its response began: it is sent again")
        if not exchange.gone and not exchange.ended:
            await exchange.fail(scope)


@dataclass
class ForwardedRequest:
    """One request, whose parts are stored to be sent again, and what was sent of its response."""

    _receive: Receive
    _send: Send
    _stored: list[Message] = field(default_factory=list)  # parts of the request that were received
    read: int = 0  # of these, parts that the current try has read
    started: bool = False  # whether the response has begun
    _bytes: int = 0  # of the body, in the parts that were received
    _streams: bool = False  # whether the response is a stream of events
    _start: Message | None = None  # of a response by the proxy itself, whose text becomes an error object
    gone: bool = False  # whether the client has left
    ended: bool = False  # whether the response is complete

    @property
    def too_long(self) -> bool:
        return self._bytes > _MOST_BYTES

    async def receive(self) -> Message:
        if self.read < len(self._stored):
            self.read += 1
            return self._stored[self.read - 1]
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            return message
        self._bytes += len(message.get("body", b""))
        if not self.too_long:
            self._stored.append(message)
            self.read += 1
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response on to the client."""
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": _once(message.get("headers", ()), b"x-request-id")}
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
            if message["status"] in _OF_RAY and kind.startswith("text/plain"):
                self._start = message
                return
        if message["type"] == "http.response.body" and self._start is not None:
            await self._refuse(self._start, message)
            return
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def fail(self, scope: Scope) -> None:
        """End the exchange with an error; a whole response that was cut is left to the server, which closes the connection."""
        advice = "the replica that answered has stopped: send the request again"
        failure = Failure(503, advice, "server_error", None, "replica_died", RETRY)
        if not self.started:
            await failure.response()(scope, self._receive, self._send)
        elif self._streams:
            await self._send({"type": "http.response.body", "body": event(failure.body()) + DONE, "more_body": False})

    async def _refuse(self, start: Message, message: Message) -> None:
        """Send a refusal of the proxy as an error object."""
        self.ended = True
        text = message.get("body", b"").decode("utf-8", "replace")
        kind = "invalid_request_error" if start["status"] == 408 else "overloaded_error"
        headers = {
            k.decode(): v.decode() for k, v in start["headers"] if k.lower() in (b"retry-after", b"x-request-id")
        }
        reason = text or "the cluster cannot answer: send the request again"
        failure = Failure(start["status"], reason, kind, headers=headers)
        await failure.response()({"type": "http"}, self._receive, self._send)


def _once(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    """Headers with the first one of a name only: the service and the proxy both add the id of the request."""
    first = next((index for index, (key, _) in enumerate(headers) if key.lower() == name), None)
    return [(key, value) for index, (key, value) in enumerate(headers) if key.lower() != name or index == first]
