"""Request record: what is known of one HTTP request, without its contents, for its log line and its span."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.tools.serve.failures import Failure

MOST_CHARACTERS = 128  # of an id that a client sends
_KEY = "spaceport.record"
_VALID = re.compile(rf"[\x21-\x7e]{{1,{MOST_CHARACTERS}}}")

# The request that the current task answers; log entries have its id.
current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


@dataclass
class RequestRecord:
    """One HTTP request: what was asked for and how it ended, without any text of it."""

    id: str
    named: bool  # whether the client sent the id in the header
    method: str
    route: str = "-"  # as the application defines it, so that no text of the client is in it
    started: float = field(default_factory=monotonic)
    status: int = 0  # 0: no response was begun
    error: str | None = None  # code or type of the error
    model: str | None = None
    answer: str | None = None  # id of the answer
    stream: bool = False
    prompts: int = 1
    decoding: Decoding | None = None  # options of the first choice
    endings: list[Ending] = field(default_factory=list)  # of each choice
    statistics: list[Statistics] = field(default_factory=list)  # of each choice
    trace: str | None = None  # id of the trace that its span is in

    def rename(self, given: str | None) -> str:
        """The id for the answer; one that the body of the request has is the request's id too, unless a header has one."""
        if given is None:
            return self.id
        if not is_valid(given):
            expected = f"expected 1 to {MOST_CHARACTERS} printable ASCII characters without spaces"
            raise Failure(400, f"request_id is invalid: {expected}", param="request_id")
        if not self.named:
            self.id = given
        return given

    def ended(self, ending: Ending, statistics: Statistics) -> None:
        """Note the end of a choice."""
        self.endings.append(ending)
        self.statistics.append(statistics)

    @property
    def prompt_statistics(self) -> list[Statistics]:
        """Those of the first choice of each prompt."""
        return self.statistics[:: max(1, len(self.statistics) // self.prompts)]

    def fields(self) -> dict[str, Any]:
        """The request as fields of a log entry; those that are unknown are left out."""
        found: dict[str, Any] = {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(monotonic() - self.started, 4),
            "error": self.error,
            "model": self.model,
            "answer": self.answer,
            "trace": self.trace,
        }
        return {name: value for name, value in {**found, **self._counts()}.items() if value is not None}

    def _counts(self) -> dict[str, Any]:
        every = self.statistics
        if not every:
            return {}
        steps, accepted = sum(one.steps for one in every), sum(sum(one.accepted_by_depth) for one in every)
        drafted = sum(sum(one.drafted_by_depth) for one in every)
        return {
            "ending": ",".join(sorted(set(self.endings))),
            "choices": len(every),
            "prompt_tokens": sum(one.prompt_tokens for one in self.prompt_statistics),
            "cached_tokens": sum(one.cached_tokens for one in self.prompt_statistics),
            "tokens": sum(one.tokens for one in every),
            "steps": steps,
            "queue_seconds": round(max(one.waiting_seconds for one in every), 4),
            "first_token_seconds": round(max(one.first_token_seconds for one in every), 4),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
        }


def begin(scope: Scope) -> RequestRecord:
    """The record of a request that has come, with the id that its header has or a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    record = RequestRecord(given if is_valid(given) else uuid.uuid4().hex, is_valid(given), scope["method"])
    scope[_KEY] = record
    return record


def record_in(scope: Scope) -> RequestRecord | None:
    """The record of a request, if the application has begun one."""
    found: RequestRecord | None = scope.get(_KEY)
    return found


def record_of(request: Request) -> RequestRecord:
    """The record of a request."""
    record: RequestRecord = request.scope[_KEY]
    return record


def is_valid(given: str) -> bool:
    """Whether an id that a client sent can be used: bounded, printable and without spaces."""
    return _VALID.fullmatch(given) is not None
