"""Failures: the responses to requests that cannot be answered, and JSON responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request import QueueFull
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.tools.serve.fields import SUPPORTED

RETRY = {"Retry-After": "1"}
_MOST_MESSAGE = 1000  # characters


@dataclass
class Failure(Exception):
    """A request that cannot be answered, with the HTTP status and the error object of OpenAI's API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The error as the body of a response or the last event of a stream."""
        message = self.message  # may quote what the client sent
        if len(message) > _MOST_MESSAGE:
            message = f"{message[: _MOST_MESSAGE - 1]}…"
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def failure_of(error: Exception) -> Failure:
    """The response to an error."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, OptionFault):
        name = str(error).partition(" ")[0]
        return Failure(400, str(error), param=name if name in SUPPORTED else None)
    if isinstance(error, QueueFull):
        return Failure(503, str(error), "overloaded_error", code="queue_full", headers=RETRY)
    if isinstance(error, RuntimeClosed):
        return Failure(503, "the service is stopping: send the request again", "overloaded_error", code="stopping")
    if isinstance(error, EngineFault):
        return Failure(500, str(error), "server_error", code="engine_fault")
    return Failure(500, f"{type(error).__name__} in the service; its log has the details", "server_error")
