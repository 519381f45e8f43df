"""Replicas of a service as an application of Ray Serve, from Python or from a serve.yaml."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.metrics import Gauge
from starlette.applications import Starlette

from spaceport.serving.application import application
from spaceport.serving.metrics import Metrics
from spaceport.serving.request_log import configure_logging
from spaceport.serving.service import Service, log
from spaceport.tools.cli.serve import openers_of, service_options_of
from spaceport.tools.replicas.arguments import Arguments, ReplicaOptions, arguments_of, deployment_options, service_of

_INTERVAL = 5.0  # seconds; Ray collects every 10
LAYERS_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
LAYERS = "spaceport.tools.replicas.proxy.layers"
# For serve.start: the proxies get the layer that sends requests again. A serve.yaml has the same table.
CONTROLLER_OPTIONS = {"runtime_env": {"env_vars": {LAYERS_VARIABLE: LAYERS}}}


async def publish(metrics: Metrics) -> None:
    """Publish the counters of a service until the task is cancelled."""
    gauges: dict[str, Any] = {}  # which take values as they are: Ray's counters only add, its histograms only observe
    while True:
        for text, sample in metrics.samples():
            name = sample.name.replace(":", "_")
            if name not in gauges:
                gauges[name] = Gauge(name, description=text, tag_keys=tuple(sample.labels))
            gauges[name].set(sample.value, tags=sample.labels)
        await asyncio.sleep(_INTERVAL)


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
        app = application(openers_of(self._given), service_options_of(self._given))
        self._service = service = app.state.service
        await closing.enter_async_context(app.router.lifespan_context(app))
        closing.callback(asyncio.create_task(publish(service.metrics)).cancel)
        app.router.lifespan_context = lambda _: _closed_by(closing)
        return app

    def check_health(self) -> None:
        """Raise if an engine call hangs: Ray then replaces the replica."""
        fault = None if self._service is None else self._service.find_fault()
        if fault is not None:
            raise fault


@asynccontextmanager
async def _closed_by(closing: AsyncExitStack) -> AsyncIterator[Any]:
    """The time until the replica ends, when its bundles are closed."""
    async with closing:
        yield


def deployment(
    models: Mapping[str, str | Path],
    options: Mapping[str, Any] | None = None,
    replicas: ReplicaOptions | None = None,
) -> serve.Application:
    """Replicas that serve bundles by name; `options` are those of `spaceport serve`, such as max_requests."""
    given = {**(options or {}), "models": {name: str(path) for name, path in models.items()}}
    replicas = replicas or ReplicaOptions()
    return _bound(Arguments(service_of(given, replicas), replicas))


def build(args: dict[str, Any]) -> serve.Application:
    """Replicas as the `args` of a serve.yaml say: `models`, options of `spaceport serve`, and the table `replicas`."""
    return _bound(arguments_of(args))


def _bound(arguments: Arguments) -> serve.Application:
    return serve.deployment(serve.ingress()(Replica), **deployment_options(arguments)).bind(arguments)
