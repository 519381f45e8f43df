"""Service: what all endpoints of one application share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.status import RuntimeStatus
from spaceport.tools.serve.audit import Audit
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.metrics import Metrics
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.served_models import ServedModel, ServedModels

log = logging.getLogger("spaceport.service")


@dataclass
class Service:
    """The open bundles, options and counters of an application."""

    options: ServiceOptions
    metrics: Metrics
    models: ServedModels = field(default_factory=lambda: ServedModels([]))
    audits: dict[str, Audit] = field(default_factory=dict)  # by model, if completions are audited
    fault: Exception | None = None  # why a bundle could not be opened, or why the service has to be started again
    draining: bool = False  # whether it was asked to stop: running requests end, new ones are refused

    @property
    def opening(self) -> bool:
        """Whether its bundles are not open yet."""
        return not list(self.models)

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return not self.draining and not self.opening and all(one.runtime.status().healthy for one in self.models)

    def find_fault(self) -> Exception | None:
        """Why the service has to be started again, if so: its fault, or an engine call that hangs, which becomes its fault."""
        if self.fault is None and not all(one.runtime.status().healthy for one in self.models):
            self.fault = EngineFault("an engine call did not return, and the service has stopped: start it again")
        return self.fault

    def status_of(self, model: ServedModel) -> RuntimeStatus:
        """The state of a model; a completion that is audited is no request."""
        status = model.runtime.status()
        audit = self.audits.get(model.name)
        if audit is None or not audit.running:
            return status
        return replace(status, active_requests=max(0, status.active_requests - 1))


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
