"""Arguments: the args of a serve.yaml are the options of `spaceport serve`, Ray gets their limits, and mistakes are named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.tools.cli.serve import command, openers_of, service_options_of
from spaceport.tools.replicas.arguments import ReplicaOptions, arguments_of, deployment_options
from support.paths import DEPLOY

pytestmark = pytest.mark.on_change("deploy/ray", "serving")

MODELS = {"chat": "/mnt/chat.bundle"}


def test_options_are_those_of_the_command_with_its_defaults_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = arguments_of({"models": MODELS, "max-requests": 3, "key_metrics": True, "limits": {"stop_strings": 5}})
    context = command.make_context(
        "serve", ["chat=/mnt/chat.bundle", "--max-requests", "3", "--key-metrics", "--limit", "stop_strings=5"]
    )
    assert found.service == context.params | {"threads": 1}
    assert found.replicas == ReplicaOptions()
    monkeypatch.setenv("SPACEPORT_MAX_REQUESTS", "77")
    monkeypatch.setenv("SPACEPORT_MODELS", "other=/mnt/other")
    found = arguments_of({"models": MODELS}).service
    assert (found["bundles"], found["max_requests"]) == (MODELS, 8)


def test_a_replica_opens_the_bundles_and_reads_the_keys_on_its_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"models": MODELS, "api_key_file": str(tmp_path / "keys"), "audit_rate": 0.5, "tool_format": "json"}
    found = pickle.loads(pickle.dumps(arguments_of(given)))  # the file is not there yet
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    options = service_options_of(found.service)
    assert (options.keys, options.audit_rate, options.tool_format) == (("sk-1",), 0.5, "json")
    with pytest.raises(BundleError, match="no such folder") as caught:
        openers_of(found.service)["chat"]()
    assert "/mnt/chat.bundle" in str(caught.value)
    monkeypatch.setenv("SPACEPORT_API_KEY", "sk-2,sk-3")
    assert service_options_of(arguments_of({"models": MODELS}).service).keys == ("sk-2", "sk-3")


def options(**args: Any) -> dict[str, Any]:
    """The options that Ray gets."""
    return deployment_options(arguments_of({"models": MODELS, **args}))


def test_a_replica_has_the_cpus_queue_and_time_that_a_service_has() -> None:
    for expected, given in ((4, {"num_cpus": 4}), (1, {"num_cpus": 0.5})):
        assert arguments_of({"models": MODELS, "replicas": given}).service["threads"] == expected
    assert arguments_of({"models": MODELS, "replicas": {"num_cpus": 4}, "threads": 2}).service["threads"] == 2
    most = DEFAULT_LIMITS.queued_requests
    for expected, waiting in ((most, {}), (0, {"queue_limit": 0}), (9, {"limits": {"queued_requests": 9}})):
        assert arguments_of({"models": MODELS, **waiting}).queue_limit == expected
        assert options(**waiting)["max_ongoing_requests"] == 8 + expected
    assert options(max_requests=3, queue_limit=5)["max_ongoing_requests"] == 8
    assert options()["graceful_shutdown_timeout_s"] == 30
    assert options(drain_timeout=7)["graceful_shutdown_timeout_s"] == 7
    assert options(replicas={"num_cpus": 4, "num_gpus": 1})["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}


def test_replicas_are_added_when_more_requests_run_and_requests_beyond_the_queue_are_refused() -> None:
    table = {"min_replicas": 2, "max_replicas": 5, "upscale_delay": 3, "downscale_delay": 4}
    found = options(max_requests=3, replicas={**table, "max_queued_requests": 9, "retry_after": 2})
    delays = {"upscale_delay_s": 3, "downscale_delay_s": 4}
    assert found["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 3, **delays}
    assert found["max_queued_requests"] == 9
    assert found["backpressure_config"] == {"status_code": 429, "retry_after_s": 2}
    assert "request_router_config" not in found
    router = options(replicas={"session_affinity": True})["request_router_config"]
    assert router["request_router_class"].endswith(".ConsistentHashRouter")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "args: no bundle is given: expected `models` with a name and a path for each"),
        ({"models": "x"}, "args: `models` is 'x': expected a table"),
        ({"max_request": 1}, "args: `max_request` is not an option: `max_requests` is one"),
        ({"max_requests": 0}, "args: max_requests is 0: expected at least 1"),
        ({"backend": "cuda"}, "args: `backend`: 'cuda' is not one of"),
        ({"api_key": "sk-secret"}, "args: `api_key` is not an option: `api_key_file` is one"),
        ({"port": 80}, "args: `port` has no effect in a cluster: http_options.port of serve.yaml sets"),
        ({"replicas": 3}, "args: `replicas` is 3: expected a table such as {max_replicas: 4}"),
        ({"replicas": {"num_replicas": 3}}, "args: `replicas.num_replicas` is not an option: `m.._replicas` is one"),
        ({"replicas": {"max_replicas": True}}, "args: replicas.max_replicas is True: expected a whole number"),
        ({"replicas": {"upscale_delay": 0}}, "args: replicas.upscale_delay is 0: expected seconds above 0"),
        ({"replicas": {"min_replicas": 3}}, "args: replicas.max_replicas is 1: expected at least 3"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message) as caught:
        arguments_of(given if "models" in given or not given else {"models": MODELS, **given})
    assert "secret" not in str(caught.value)


def test_the_file_in_the_checkout_has_valid_arguments_with_keys_and_is_reached_from_this_machine_only() -> None:
    content = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text("utf-8"))
    (application,) = content["applications"]
    arguments = arguments_of(application["args"])
    assert arguments.service["bundles"]
    assert arguments.replicas.max_replicas > arguments.replicas.min_replicas > 0
    assert application["args"]["api_key_file"] == "/etc/spaceport/keys/keys"
    assert content["http_options"]["host"] == "127.0.0.1"
