"""The responses to requests that cannot be answered, and JSON responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

RETRY = {"Retry-After": "1"}
_MOST_MESSAGE = 1000  # characters


class ErrorContent(Struct):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None  # field of the body
    code: str | None


class Error(Struct):
    """The body of an answer to a request that is not answered."""

    error: ErrorContent


@dataclass
class Failure(Exception):
    """A request that cannot be answered, with the HTTP status and the error object of OpenAI's API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> Error:
        """The error as the body of a response or the last event of a stream."""
        message = self.message  # may quote what the client sent
        if len(message) > _MOST_MESSAGE:
            message = f"{message[: _MOST_MESSAGE - 1]}…"
        return Error(ErrorContent(message, self.kind, self.param, self.code))

    def response(self) -> Response:
        """The whole response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def invalid(field: str, what: str) -> Failure:
    """The failure of a request with an invalid field."""
    return Failure(400, f"{field} {what}", param=field)


def overloaded(reason: str, code: str | None = None, headers: dict[str, str] | None = None) -> Failure:
    """The failure of a request that may succeed later."""
    message = f"{reason}: send the request again"
    return Failure(503, message, "overloaded_error", code=code, headers=RETRY | (headers or {}))
