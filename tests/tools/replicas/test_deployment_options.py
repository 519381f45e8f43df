"""Deployment options: Ray gets the limits that the replicas themselves have."""

from __future__ import annotations

from typing import Any

import pytest

from spaceport.tools.replicas.arguments import arguments_of
from spaceport.tools.replicas.deployment_options import deployment_options


def options(**args: Any) -> dict[str, Any]:
    return deployment_options(arguments_of({"models": {"chat": "/mnt/chat.bundle"}, **args}))


def test_a_replica_gets_the_requests_that_decode_and_those_that_wait() -> None:
    assert options(max_requests=3, queue_limit=5)["max_ongoing_requests"] == 8
    assert options()["max_ongoing_requests"] == 8 + 256
    assert options(queue_limit=0)["max_ongoing_requests"] == 8


def test_replicas_are_added_when_more_requests_run_than_decode_at_a_time() -> None:
    table = {"min_replicas": 2, "max_replicas": 5, "upscale_delay": 3, "downscale_delay": 4}
    assert options(max_requests=3, replicas=table)["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 3,
        "upscale_delay_s": 3,
        "downscale_delay_s": 4,
    }


def test_a_replica_that_is_removed_has_the_time_that_a_service_has() -> None:
    assert options()["graceful_shutdown_timeout_s"] == 30
    assert options(drain_timeout=7)["graceful_shutdown_timeout_s"] == 7


def test_requests_beyond_the_queue_are_refused_with_a_time_to_wait() -> None:
    found = options(replicas={"max_queued_requests": 9, "retry_after": 2})
    assert found["max_queued_requests"] == 9
    assert found["backpressure_config"] == {"status_code": 429, "retry_after_s": 2}


def test_a_replica_gets_its_cpus_and_gpus() -> None:
    assert options(replicas={"num_cpus": 4, "num_gpus": 1})["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}


@pytest.mark.parametrize(("affinity", "router"), [(True, "ConsistentHashRouter"), (False, None)])
def test_only_sessions_have_a_router_of_their_own(affinity: bool, router: str | None) -> None:
    found = options(replicas={"session_affinity": affinity}).get("request_router_config")
    assert (found is None) == (router is None)
    assert found is None or found["request_router_class"].endswith(f".{router}")


@pytest.mark.nightly
def test_ray_takes_the_options() -> None:
    serve = pytest.importorskip("ray.serve", reason="needs Ray: pip install -c constraints.txt '.[cpu,serve,ray]'")
    found = serve.deployment(type("Empty", (), {}), **options(queue_limit=2, replicas={"session_affinity": True}))
    assert (found.name, found.max_ongoing_requests, found.backpressure_config.status_code) == ("Replica", 10, 429)
