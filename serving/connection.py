"""A client's connection, which ends if its requests do not arrive in time and in bounds, or if it does not read."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from spaceport.serving.failures import Failure, overloaded
from spaceport.serving.service import Service, log

MOST_HEAD_BYTES = 64 << 10  # of a request: its target and headers
_MOST_PIPELINED = 64  # requests that a client sends before the response to an earlier one
_WARNING_INTERVAL = 60.0  # seconds between warnings that there are too many connections
_LINGER_BYTES = 16 << 20  # dropped of a request after its answer
_MOST_LINGERING = 64  # connections that are answered and drop what comes


class LingeringTransport:
    """A transport whose `close` lets a client that still sends read its answer first; all else is the socket's.

    Closing a socket with unread bytes resets the connection, and the reset can overtake the answer.
    So `close` ends the sending side only, and the connection drops what comes, until the client closes or a limit.
    """

    def __init__(self, socket: asyncio.Transport, connection: ClientConnection) -> None:
        self.socket = socket
        self.lingers = False
        self._connection = connection

    def close(self) -> None:
        """Close after the answer is read if the client still sends, else at once; the second call closes at once."""
        if self.is_closing() or not self._connection.is_sending:
            self.socket.close()
        else:
            self.lingers = True
            self.socket.write_eof()
            self._connection.linger()

    def is_closing(self) -> bool:
        return self.lingers or self.socket.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the transport is closing."""
        if not self.lingers:
            self.socket.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol on httptools, which takes a third of h11's time for a request, with the limits that it lacks."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._service: Service = config.app.state.service  # type: ignore[union-attr]  # a Starlette application
        self._head_since: float | None = None  # since when a head is awaited, in the time of the event loop
        self._has_begun = False  # whether anything of a request has come
        self._head_bytes = 0
        self._silent_bytes = 0  # since the last part of a request that was complete: a header, trailer or chunk size
        self._was_silent = False
        self._unsent_since: float | None = None  # since when the client reads nothing of what waits for it
        self._answered = False  # whether a request was
        self._is_refused = False  # whether the last answer was sent without regard to what the client sends
        self._is_within = False  # whether a request has come in part
        self._late_bytes = 0  # that came of a request after its answer
        self._lingers_since = math.inf  # in the time of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, or refuse the connection."""
        self._lingering = LingeringTransport(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self._head_since = self.loop.time()
        if len(self.connections) - len(self._service.lingering) > self._service.options.most_connections:
            self._service.metrics.refused("too_many_connections")
            if self._head_since - self._service.warned_at >= _WARNING_INTERVAL:
                self._service.warned_at = self._head_since
                log.warning("connections are closed: %d are open", len(self.connections) - 1)
            if (silent := self._service.longest_silent()) is None:
                self._refuse(overloaded("the service has too many connections", "too_many_connections"))
                return
            silent.transport.close()
        self._service.silent[self._answered][self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._speaks()
        self._service.lingering.pop(self, None)
        super().connection_lost(exc)

    def _speaks(self) -> None:
        """Note that a request has come: the connection makes no room for others."""
        for silent in self._service.silent:
            silent.pop(self, None)

    @property
    def is_sending(self) -> bool:
        """Whether the client may still send and waits for an answer that is complete."""
        return self._is_refused or (self._is_within and not self._runs and self.cycle is not None)

    def linger(self) -> None:
        """Drop what comes from now on; the connection that has done so longest is closed if there are too many."""
        self._lingers_since = self.loop.time()
        self._speaks()
        self.flow.resume_reading()
        lingering: dict[Any, None] = self._service.lingering
        if len(lingering) >= _MOST_LINGERING:
            next(iter(lingering)).transport.abort()
        lingering[self] = None

    @property
    def _runs(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drop(self, size: int) -> None:
        """Count bytes that came after the answer to their request."""
        self._late_bytes += size
        if self._late_bytes > _LINGER_BYTES:
            self._lingering.socket.close()

    def check(self, now: float) -> None:
        """Close the connection if the client is late; called several times per second."""
        options = self._service.options
        if now - self._lingers_since > options.body_timeout:
            self._lingering.socket.close()
        if self._lingering.socket.is_closing() and self._unsent_since is None:
            self._unsent_since = now
        if self._unsent_since is not None:
            if now - self._unsent_since > options.send_timeout:
                self.transport.abort()
        elif self._lingering.lingers:
            return
        elif self._head_since is not None and not self._runs and now - self._head_since > options.head_timeout:
            if not self._has_begun:
                self.transport.close()
            else:
                seconds = f"{options.head_timeout:g} seconds"
                self._refuse(Failure(408, f"the headers did not come within {seconds}: send the request again"))

    def _refuse(self, failure: Failure) -> None:
        """Close the connection, with a response unless another one has begun."""
        if not (self.pipeline or (self._runs and self.cycle.response_started)):
            response = failure.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[failure.status] + lines + b"\r\n" + response.body)
            self._is_refused = True
            if self._runs:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what has come; what the parser keeps without a result is bounded too."""
        if self.transport.is_closing():
            self._drop(len(data))
            return
        self._was_silent = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            log.info("a request for another protocol than HTTP/1.1 is answered as any other")
        except httptools.HttpParserError:
            self._refuse_head()
            return
        self._silent_bytes = self._silent_bytes + len(data) if self._was_silent else 0
        if self._silent_bytes > MOST_HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        if max(self._head_bytes, self._silent_bytes) > MOST_HEAD_BYTES:
            failure = Failure(431, f"the headers have more than {MOST_HEAD_BYTES} bytes: send fewer or shorter ones")
        else:
            failure = Failure(400, "the request is not valid HTTP/1.1")
        log.info("a connection ends: %s", failure.message)
        self._refuse(failure)

    # Called by the parser; an error that is raised here reaches `data_received` as an HttpParserError.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._has_begun = self._is_within = True
        self._head_bytes = self._late_bytes = 0
        if self._head_since is None:
            self._head_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come, or a trailer after the body."""
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEAD_BYTES:
            raise ValueError("too many bytes of headers")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests at a time")
        self._head_since = None
        self._was_silent = False
        self._speaks()
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._was_silent = False
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        self._was_silent = self._is_within = False
        super().on_message_complete()

    # Called when something was sent.

    def on_response_complete(self) -> None:
        """Go on with the requests that wait before any more are read."""
        super().on_response_complete()
        self._answered = True
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.flow.pause_reading()
        elif not self._runs:
            self._service.silent[self._answered][self] = None
        if self._head_since is not None:
            self._head_since = self.loop.time()

    def pause_writing(self) -> None:
        self._unsent_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unsent_since = None
        super().resume_writing()
