"""Service: what all endpoints of one application share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from starlette.requests import Request

from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.metrics import Metrics
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.served_models import ServedModels

log = logging.getLogger("spaceport.service")


@dataclass
class Service:
    """The open bundles, options and counters of an application."""

    options: ServiceOptions
    metrics: Metrics
    models: ServedModels = field(default_factory=lambda: ServedModels([]))
    fault: Exception | None = None  # why a bundle could not be opened
    draining: bool = False  # whether it was asked to stop: running requests end, new ones are refused

    @property
    def opening(self) -> bool:
        """Whether its bundles are not open yet."""
        return not list(self.models)

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return not self.draining and not self.opening and all(one.runtime.status().healthy for one in self.models)


def service_of(request: Request) -> Service:
    """The service that answers a request."""
    service: Service = request.app.state.service
    return service


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request; raises if it is larger than `most` bytes."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise Failure(413, f"the body has more than {most} bytes: send a smaller one", code="body_too_large")
    return bytes(found)
