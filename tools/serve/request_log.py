"""Request log: a layer of the application that gives each request an id and logs its end, without contents."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spaceport.tools.serve.failures import failure_of, json_response
from spaceport.tools.serve.request_record import RequestRecord, begin, current
from spaceport.tools.serve.service import log

_QUIET = ("/health", "/v2/", "/metrics", "/load")  # asked for every few seconds: logged at level debug


class Spans(Protocol):
    """Where requests are traced."""

    def begin(self, record: RequestRecord, scope: Scope) -> Any:
        """Begin the span of a request."""

    def end(self, span: Any, record: RequestRecord) -> None:
        """End a span with what is known of its request."""


class LogRequests:
    """An application that adds X-Request-Id to each response, answers errors that nothing else does, and logs the end."""

    def __init__(self, app: ASGIApp, paths: Collection[str], spans: Spans | None = None) -> None:
        self._app = app
        self._paths = frozenset(paths)  # of requests that are refused before they are routed
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin(scope)
        current.set(record)  # in this task and those that it starts
        span = None if self._spans is None or record.method != "POST" else self._spans.begin(record, scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001  (a bug: logged, and reported to the client)
            failure = failure_of(error)
            record.error = failure.code or failure.kind
            log.error("a request failed", exc_info=error)
            if not record.status:
                await json_response(failure.body(), failure.status, failure.headers)(scope, receive, send_with_id)
        finally:
            record.route = self._route(scope)
            self._log(record)
            if self._spans is not None and span is not None:
                self._spans.end(span, record)

    def _route(self, scope: Scope) -> str:
        path: str = getattr(scope.get("route"), "path", "")
        return path or (scope["path"] if scope["path"] in self._paths else "-")

    def _log(self, record: RequestRecord) -> None:
        quiet = record.route.startswith(_QUIET)
        log.log(logging.DEBUG if quiet else logging.INFO, "request ended", extra={"fields": record.fields()})
