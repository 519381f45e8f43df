"""Runs an application under uvicorn until a signal stops it; requests that run may end first."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.memory import return_freed_memory
from spaceport.serving.application import close_models
from spaceport.serving.clients import is_local
from spaceport.serving.connection import ClientConnection
from spaceport.serving.service import Service, log

_IDLE = 5  # seconds until a connection without a request is closed
_TRIM = 60.0  # seconds between the returns of freed memory to the system, of some milliseconds each
_LAST_EVENTS = 5  # seconds for errors to reach the clients of requests that were ended


class Server(uvicorn.Server):
    """A server that refuses new requests at the first signal and stops when no request runs, or after a timeout."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._stop_at: float | None = None
        self._trim_at = monotonic() + _TRIM
        self._announced = False

    def _announce(self) -> None:
        """Log the addresses at which requests are accepted now; uvicorn logs none for a socket that it is given."""
        for listener in (listener for server in self.servers for listener in server.sockets):
            host, port = listener.getsockname()[:2]
            log.info("running on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        self._announced = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal ends the time that running requests have."""
        if self._service.draining:
            self._stop_at = monotonic()
            return
        self._service.draining = True
        self._stop_at = monotonic() + self._service.options.drain_timeout
        log.info("stopping: %d requests run", len(self.server_state.tasks))

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of late clients, return freed memory; whether to stop now. Called ten times per second."""
        if self._service.models and not self._announced:
            self._announce()
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, ClientConnection):
                connection.check(now)
        if monotonic() >= self._trim_at:
            self._trim_at = monotonic() + _TRIM
            return_freed_memory()
        if self._stop_at is not None and not self.should_exit:
            late = monotonic() >= self._stop_at
            if late:
                log.warning("%d requests ended unfinished", len(self.server_state.tasks))
                await close_models(self._service.models.values())
            self.should_exit = late or not self.server_state.tasks
        self.should_exit = self.should_exit or self._service.find_fault() is not None
        return await super().on_tick(counter)


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address, before bundles are opened; raises if that is not possible."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OptionFault(
            f"{host} port {port}: {error.strerror}: expected a free port and an address of this machine"
        ) from error
    return listener


def configuration(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """How uvicorn runs an application."""
    app.state.service.is_local = is_local(host)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=ClientConnection,
        ws="none",
        log_config=None,  # requests are not logged
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=_LAST_EVENTS,
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve an application; returns after a signal, raises if a bundle cannot be opened or an engine call hangs."""
    service: Service = app.state.service
    Server(configuration(app), service).run([listener])
    if service.fault is not None:
        raise service.fault
