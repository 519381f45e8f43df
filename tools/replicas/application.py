"""Application: replicas of a service as an application of Ray Serve, from Python or from a serve.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from spaceport.tools.replicas.arguments import Arguments, ReplicaOptions, arguments_of, service_of
from spaceport.tools.replicas.deployment_options import deployment_options
from spaceport.tools.replicas.replica import LAYERS, LAYERS_VARIABLE, Replica

# For serve.start: the proxies get the layer that sends requests again. A serve.yaml has the same table.
CONTROLLER_OPTIONS = {"runtime_env": {"env_vars": {LAYERS_VARIABLE: LAYERS}}}


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
