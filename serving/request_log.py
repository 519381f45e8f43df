"""What is known of each request, without its contents, for its log entry; how log entries look."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import uuid
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.serving.bodies import SUPPORTED
from spaceport.serving.failures import RETRY, Failure, overloaded
from spaceport.serving.service import log

MOST_CHARACTERS = 128  # of an id that a client sends
_KEY = "spaceport.record"
_VALID = re.compile(rf"[\x21-\x7e]{{1,{MOST_CHARACTERS}}}")
_QUIET = ("/health", "/metrics", "/load")  # asked for every few seconds: logged at level debug

# The request that the current task answers; log entries have its id.
current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


@dataclass
class RequestRecord:
    """One HTTP request: what was asked for and how it ended, without any text of it."""

    id: str
    method: str
    route: str = "-"  # as the application defines it, so that no text of the client is in it
    started: float = field(default_factory=monotonic)
    status: int = 0  # 0: no response was begun
    error: str | None = None  # code or type of the error
    model: str | None = None
    answer: str | None = None  # id of the answer
    prompts: int = 1
    endings: list[str] = field(default_factory=list)  # of each choice
    statistics: list[Statistics] = field(default_factory=list)  # of each choice

    def ended(self, ending: str, statistics: Statistics) -> None:
        self.endings.append(ending)
        self.statistics.append(statistics)

    def fields(self) -> dict[str, Any]:
        """The request as fields of a log entry; those that are unknown are left out."""
        fields: dict[str, Any] = {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": monotonic() - self.started,
            "error": self.error,
            "model": self.model,
            "answer": self.answer,
            **({"ending": ",".join(sorted(set(self.endings)))} if self.endings else {}),
            **self.counts(),
        }
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }

    def counts(self) -> dict[str, Any]:
        """Counts of all choices, times of the slowest; empty if nothing was generated."""
        choices = self.statistics
        if not choices:
            return {}
        prompts = choices[:: max(1, len(choices) // self.prompts)]  # the first choice of each
        return {
            "choices": len(choices),
            "prompt_tokens": sum(prompt.prompt_tokens for prompt in prompts),
            "cached_tokens": sum(prompt.cached_tokens for prompt in prompts),
            "tokens": sum(choice.tokens for choice in choices),
            "steps": sum(choice.steps for choice in choices),
            "queue_seconds": max(choice.waiting_seconds for choice in choices),
            "first_token_seconds": max(choice.first_token_seconds for choice in choices),
            "draft_tokens": sum(sum(choice.drafted_by_depth) for choice in choices),
            "accepted_tokens": sum(sum(choice.accepted_by_depth) for choice in choices),
        }


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[_KEY]
    return record


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, OptionFault):
        name = str(error).partition(" ")[0]
        return Failure(400, str(error), param=name if name in SUPPORTED else None)
    if isinstance(error, QueueFull):
        return Failure(503, str(error), "overloaded_error", code="queue_full", headers=RETRY)
    if isinstance(error, RuntimeClosed):
        return overloaded("the service is stopping", "stopping")
    if isinstance(error, EngineFault):
        return Failure(500, str(error), "server_error", code="engine_fault")
    return Failure(500, f"{type(error).__name__} in the service; its log has the details", "server_error")


def recorded_failure(error: Exception, scope: Scope) -> Failure:
    """The failure that an error is for the client, which the record of its request has from now on."""
    failure = _failure_of(error)
    record: RequestRecord | None = scope.get(_KEY)
    if record is not None:
        record.error = failure.code or failure.kind
    return failure


class LogRequests:
    """An application that adds X-Request-Id to each response, answers errors that nothing else does, and logs the end."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)  # of requests that are refused before they are routed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        record = RequestRecord(name if _VALID.fullmatch(name) else uuid.uuid4().hex, scope["method"])
        scope[_KEY] = record
        current.set(record)  # in this task and those that it starts

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001  (a bug: logged, and reported to the client)
            failure = recorded_failure(error, scope)
            log.error("a request failed", exc_info=error)
            if not record.status:
                await failure.response()(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            record.route = getattr(scope.get("route"), "path", "") or (path if path in self._paths else "-")
            level = logging.DEBUG if record.route.startswith(_QUIET) else logging.INFO
            log.log(level, "request ended", extra={"fields": record.fields()})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    request = current.get()
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields if request is None else {"id": request.id, **fields}


class _EntryFormatter(logging.Formatter):
    """Entries whose errors have their stack, but no message: it may quote text of a request."""

    def formatException(self, ei: Any) -> str:
        """The stack and type of an error and of its causes."""
        error: BaseException | None = ei[1]
        stacks = []
        while error is not None:
            message = f": {error}" if isinstance(error, EngineFault) else ""
            stacks.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__ + message)
            error = error.__cause__
        return "\ncaused by\n".join(stacks)


class TextLines(_EntryFormatter):
    """Entries as lines of text, with their fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


class JsonLines(_EntryFormatter):
    """Entries as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(form: str, level: str) -> None:
    """Write the entries of this process to stderr; debug entries are those of Spaceport only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=max(logging.INFO, logging.getLevelName(level.upper())), handlers=[handler], force=True)
    logging.getLogger("spaceport").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its steps of starting and stopping have entries here
