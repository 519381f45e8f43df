"""What `args` of a serve.yaml say, checked before anything is deployed, and what Ray Serve gets of it; needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.option_fields import check_options, documented, option, option_fields
from spaceport.tools.cli.configuration import nearest, options_in
from spaceport.tools.cli.serve import command, service_options_of

_SOURCE = "args"
NAME = "Replica"  # of the deployment in its application
_SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Seconds of a health check: with Ray's 30, requests of a replica that hangs wait for two minutes.
_CHECK_TIMEOUT = 10.0
_SHUTDOWN_CHECK = 0.5  # seconds between two looks of a replica that is to end at its requests
_OF_RAY = {
    "host": "http_options.host of serve.yaml sets the address of Ray's proxies",
    "port": "http_options.port of serve.yaml sets the port of Ray's proxies",
}


@documented
@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are, and what each one gets."""

    min_replicas: int = option(1, "Replicas that always run; 0: none without requests.", 0)
    max_replicas: int = option(1, "Replicas at the highest load.")
    num_cpus: float = option(1.0, "CPUs of a replica, and its threads unless the option `threads` is set.", 0)
    num_gpus: float = option(0.0, "GPUs of a replica.", 0)
    max_queued_requests: int = option(
        256, "Requests that wait in each proxy while all replicas are full; others get status 429.", 0
    )
    retry_after: float = option(1.0, "Seconds after which a client that got status 429 may try again.", 0)
    session_affinity: bool = option(False, "Whether requests with the same header x-session-id go to the same replica.")
    upscale_delay: float = option(30.0, "Seconds of load before a replica is added.")
    downscale_delay: float = option(600.0, "Seconds without load before a replica is removed.")
    health_check_period: float = option(10.0, "Seconds between health checks; a replica that fails three is replaced.")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("upscale_delay", "downscale_delay", "health_check_period"):
            if not getattr(self, name) > 0:
                raise OptionFault(f"{name} is {getattr(self, name)}: expected seconds above 0")
        if self.max_replicas < max(1, self.min_replicas):
            least = max(1, self.min_replicas)
            raise OptionFault(f"max_replicas is {self.max_replicas}: expected at least {least}, as min_replicas says")


@dataclass(frozen=True)
class Arguments:
    """What a deployment is built from."""

    service: Mapping[str, Any]  # the options of `spaceport serve` by name, and its bundles
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)

    @property
    def queue_limit(self) -> int:
        """Requests that wait in a replica."""
        given: int | None = self.service["queue_limit"]
        limits: Limits = self.service["limits"]
        return limits.queued_requests if given is None else given


def arguments_of(given: Mapping[str, Any]) -> Arguments:
    """The arguments of a deployment; raises for unknown names, wrong types and values out of range."""
    content = {name.replace("-", "_"): value for name, value in given.items()}
    replicas = _replica_options(content.pop("replicas", {}))
    return Arguments(service_of(content, replicas), replicas)


def service_of(given: Mapping[str, Any], replicas: ReplicaOptions) -> dict[str, Any]:
    """All options of `spaceport serve` with those that are given; paths are those of the machines of the replicas."""
    for name, remedy in _OF_RAY.items():
        if name in given:
            raise OptionFault(f"{_SOURCE}: `{name}` has no effect in a cluster: {remedy}")
    if given.get("models") in (None, {}):
        raise OptionFault(f"{_SOURCE}: no bundle is given: expected `models` with a name and a path for each")
    found = options_in(command, given, _SOURCE)
    for name, least in (("max_requests", 1), ("queue_limit", 0)):
        if found[name] is not None and found[name] < least:
            raise OptionFault(f"{_SOURCE}: {name} is {found[name]}: expected at least {least}")
    if not found["threads"]:
        found["threads"] = max(1, int(replicas.num_cpus))
    service_options_of({**found, "api_key_file": None})  # keys are read by the replicas, on their machines
    return found


def _replica_options(given: Any) -> ReplicaOptions:
    if not isinstance(given, Mapping):
        raise OptionFault(f"{_SOURCE}: `replicas` is {given!r:.40}: expected a table such as {{max_replicas: 4}}")
    known = [declared.name for declared in option_fields(ReplicaOptions)]
    for name in given:
        if name not in known:
            raise OptionFault(f"{_SOURCE}: `replicas.{name}` is not an option: {nearest(str(name), known)}")
    try:
        return ReplicaOptions(**given)
    except OptionFault as error:
        raise OptionFault(f"{_SOURCE}: replicas.{error}") from error


def deployment_options(arguments: Arguments) -> dict[str, Any]:
    """The options of `ray.serve.deployment`."""
    own, service = arguments.replicas, arguments.service
    router = {"request_router_config": {"request_router_class": _SESSION_ROUTER}} if own.session_affinity else {}
    return router | {
        "name": NAME,
        # A replica batches by itself: it gets as many requests as decode at a time and wait.
        "max_ongoing_requests": service["max_requests"] + arguments.queue_limit,
        "max_queued_requests": own.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": own.retry_after},
        "autoscaling_config": {
            "min_replicas": own.min_replicas,
            "max_replicas": own.max_replicas,
            "target_ongoing_requests": service["max_requests"],
            "upscale_delay_s": own.upscale_delay,
            "downscale_delay_s": own.downscale_delay,
        },
        "ray_actor_options": {"num_cpus": own.num_cpus, "num_gpus": own.num_gpus},
        "graceful_shutdown_timeout_s": service["drain_timeout"],
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_CHECK,
        "health_check_period_s": own.health_check_period,
        "health_check_timeout_s": _CHECK_TIMEOUT,
    }
