"""A service that listens on this machine while a test runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from starlette.applications import Starlette

from spaceport.runtime.scheduling.worker import RuntimeStatus
from spaceport.serving.application import Opener, application
from spaceport.serving.options import ServiceOptions
from spaceport.serving.server import Server, configuration
from spaceport.serving.service import Service

_WAIT = 60.0  # seconds for anything that has to happen


@dataclass(frozen=True)
class RunningService:
    """A running service."""

    url: str  # with the path /v1
    service: Service
    server: Server

    @property
    def statuses(self) -> dict[str, RuntimeStatus]:
        """The state of each model."""
        return {model.name: model.runtime.status() for model in self.service.models.values()}

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits; fails if one goes on."""
        _wait(lambda: not any(one.active_requests or one.queued_requests for one in self.statuses.values()))
        assert all(one.kv_slots_used == 0 for one in self.statuses.values())

    def wait_until_busy(self) -> None:
        """Wait until a request runs."""
        _wait(lambda: any(one.active_requests for one in self.statuses.values()))


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT
    while not done():
        assert time.monotonic() < end, f"it does not happen within {_WAIT} seconds"
        time.sleep(0.01)


@contextmanager
def running_service(openers: Mapping[str, Opener], options: ServiceOptions | None = None) -> Iterator[RunningService]:
    """Serve bundles on a free port, in a thread of this process."""
    app: Starlette = application(openers, options or ServiceOptions())
    server = Server(configuration(app), app.state.service)
    thread = Thread(target=server.run)
    thread.start()
    try:
        _wait(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield RunningService(f"http://127.0.0.1:{port}/v1", app.state.service, server)
    finally:
        server.should_exit = True
        thread.join(_WAIT)
