"""Replica: the application of `spaceport serve` in a process of a Ray cluster, with the checks and metrics of Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette

from spaceport.serving.application import application
from spaceport.serving.request_log import configure_logging
from spaceport.serving.service import Service, log
from spaceport.tools.cli.serve import openers_of, service_options_of, spans_of
from spaceport.tools.replicas.arguments import Arguments
from spaceport.tools.replicas.published_metrics import publish

LAYERS_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
LAYERS = "spaceport.tools.replicas.proxy.layers"


class Replica:
    """One replica of a service; it gets requests when its bundles are open."""

    def __init__(self, arguments: Arguments) -> None:
        self._given = arguments.service
        self._service: Service | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """The application with open bundles; Ray reports an error in it as the reason why the replica does not start."""
        configure_logging(self._given["log_format"], self._given["log_level"])
        if os.environ.get(LAYERS_VARIABLE) != LAYERS:
            log.warning(
                "requests of a replica that dies are lost: set %s=%s for Ray's proxies", LAYERS_VARIABLE, LAYERS
            )
        closing = AsyncExitStack()
        spans = spans_of(self._given["otel"])
        if spans is not None:
            closing.callback(spans.close)
        app = application(openers_of(self._given), service_options_of(self._given), spans=spans)
        self._service = app.state.service
        await closing.enter_async_context(app.router.lifespan_context(app))
        await closing.enter_async_context(_publishing(self._service))
        app.router.lifespan_context = lambda _: _closed_by(closing)
        return app

    def check_health(self) -> None:
        """Raise if an engine call hangs: Ray then replaces the replica."""
        fault = None if self._service is None else self._service.find_fault()
        if fault is not None:
            raise fault


@asynccontextmanager
async def _publishing(service: Service) -> AsyncIterator[None]:
    """The time in which the metrics of a service are those of Ray too."""
    task = asyncio.create_task(publish(service.metrics, service.options.metrics_prefix))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _closed_by(closing: AsyncExitStack) -> AsyncIterator[Any]:
    """The time until the replica ends, when its bundles are closed."""
    async with closing:
        yield
