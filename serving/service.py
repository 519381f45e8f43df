"""A service: the open bundles by name, and the options and counters that its endpoints share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from starlette.requests import Request

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.worker import RuntimeStatus
from spaceport.runtime.session import Runtime
from spaceport.runtime.tool_calls.functions import ToolFormat, format_of
from spaceport.serving.audit import CompletionAudit
from spaceport.serving.failures import RETRY, Failure, overloaded
from spaceport.serving.metrics import Metrics
from spaceport.serving.options import ServiceOptions

_BETWEEN = 0.006  # seconds between two requests; each takes about a millisecond of the interpreter
_MOST_WAIT = 0.03  # seconds that a request waits, however many come
_LARGE_REST = 2.0  # times that it took to parse a large body, until the next one is parsed

log = logging.getLogger("spaceport.service")


@dataclass(frozen=True)
class ServedModel:
    """An open bundle with the name under which clients ask for it."""

    name: str
    runtime: Runtime
    audit: CompletionAudit | None = None  # of its completions, if they are audited
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def chat_template(self) -> str:
        """The source of the chat template; empty: the model has none."""
        files, bundle = self.runtime.bundle.manifest.files, self.runtime.bundle
        return bundle.read(TEMPLATE_FILE).decode("utf-8", "replace") if TEMPLATE_FILE in files else ""

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of functions, as its chat template does."""
        return format_of(self.chat_template)

    @cached_property  # each event of a stream has it
    def fingerprint(self) -> str:
        """First digits of the digest of the bundle's manifest, which has the digests of its files."""
        return f"fp_{sha256(self.runtime.bundle.manifest_content).hexdigest()[:16]}"

    def status(self) -> RuntimeStatus:
        """The state of the model; a completion that is repeated by the audit is no request."""
        status = self.runtime.status()
        if self.audit is None or not self.audit.running:
            return status
        return replace(status, active_requests=max(0, status.active_requests - 1))

    def entry(self) -> dict[str, Any]:
        """The model as an entry of the list of models."""
        manifest = self.runtime.bundle.manifest
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "spaceport",
            "root": manifest.provenance.get("name", self.name),
            "max_model_len": self.runtime.max_seq_len,
            "has_chat_template": bool(self.chat_template),
            "spaceport": {
                "mask_slots": manifest.drafts.mask_slots,
                "heads": manifest.drafts.heads,
                "fork": manifest.tokens.fork is not None,
            },
        }


@dataclass
class Spacing:
    """When requests begin while completions run, so that many at a time do not take the interpreter from their steps.

    Times are those of the event loop.
    """

    _next: float = 0.0  # earliest time of the next request
    _next_large: float = 0.0  # and of the next large body
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self, now: float) -> float:
        """When a request begins that comes now."""
        start = max(now, min(self._next, now + _MOST_WAIT))
        self._next = start + _BETWEEN
        return start

    async def begin(self) -> None:
        """Wait until a request may begin."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self.start(now) - now)

    @asynccontextmanager
    async def one_large(self) -> AsyncIterator[None]:
        """Parse a large body inside the block: one at a time, with rests between them."""
        clock = asyncio.get_running_loop().time
        async with self._large:
            await asyncio.sleep(self._next_large - clock())
            began = clock()
            try:
                yield
            finally:
                self._next_large = clock() + _LARGE_REST * (clock() - began)


@dataclass
class Service:
    """The open bundles, options and counters of an application."""

    options: ServiceOptions
    metrics: Metrics
    models: dict[str, ServedModel] = field(default_factory=dict)  # by name; empty until all bundles are open
    fault: Exception | None = None  # why a bundle could not be opened, or why the service has to be started again
    warned_at: float = -math.inf  # when the log last told of too many connections, in the time of the event loop
    # connections without a request, in the order in which they became silent: those that never had one, and others
    silent: tuple[dict[Any, None], dict[Any, None]] = field(default_factory=lambda: ({}, {}))
    lingering: dict[Any, None] = field(default_factory=dict)  # connections that drop what comes after their last answer
    is_local: bool = False  # whether it listens on a loopback address
    body_bytes: int = 0  # of all bodies that are being received and read
    completions: Counter[str] = field(default_factory=Counter)  # that run or wait, by client
    spacing: Spacing = field(default_factory=Spacing)
    draining: bool = False  # whether it was asked to stop: running requests end, new ones are refused

    @property
    def opening(self) -> bool:
        """Whether its bundles are not open yet."""
        return not self.models

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return not self.draining and not self.opening and self.healthy

    def require_open(self) -> None:
        """Raise until the bundles are open."""
        if self.opening:
            raise overloaded("the models are being opened", "opening")

    def longest_silent(self) -> Any:
        """The connection that makes room for another one, which is forgotten; None: all have a request."""
        for silent in self.silent:
            for connection in silent:
                del silent[connection]
                return connection
        return None

    def begin(self, tenant: str, count: int) -> None:
        """Count completions of a client, until `end`; raises if it has too many."""
        most = self.options.most_client_requests
        running = self.completions[tenant]
        if most is not None and running + count > most:
            message = (
                f"{running} completions of this client run or wait and {count} are asked for: expected at most {most}"
            )
            raise Failure(429, message, "rate_limit_error", code="too_many_requests", headers=RETRY)
        self.completions[tenant] += count

    def end(self, tenant: str, count: int = 1) -> None:
        """Count completions of a client no longer."""
        self.completions[tenant] -= count
        if not self.completions[tenant]:
            del self.completions[tenant]

    @property
    def healthy(self) -> bool:
        """Whether no engine call hangs."""
        return all(model.runtime.status().healthy for model in self.models.values())

    def model(self, name: str | None) -> ServedModel:
        """The model that a request asks for; a request that names none gets the only one."""
        self.require_open()
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            known = ", ".join(map(repr, self.models))
            asked = "no model is given" if name is None else f"the model {name!r} does not exist"
            raise Failure(404, f"{asked}: expected {known}", param="model", code="model_not_found")
        return self.models[name]

    def find_fault(self) -> Exception | None:
        """Why the service has to be started again, if so: its fault, or an engine call that hangs, which becomes its fault."""
        if self.fault is None and not self.healthy:
            self.fault = EngineFault("an engine call did not return, and the service has stopped: start it again")
        return self.fault


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
