"""Deployment options: what Ray Serve has to know of replicas; needs no Ray."""

from __future__ import annotations

from typing import Any

from spaceport.tools.replicas.arguments import Arguments

NAME = "Replica"  # of the deployment in its application

_SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Seconds of a health check: with Ray's 30, requests of a replica that hangs wait for two minutes.
_CHECK_TIMEOUT = 10.0
_SHUTDOWN_CHECK = 0.5  # seconds between two looks of a replica that is to end at its requests


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
