"""Manifests for Kubernetes and KServe: restricted pods whose commands, ports, paths and names are those of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spaceport.serving.application import application
from spaceport.serving.server import _LAST_EVENTS
from spaceport.tools.cli.serve import command
from support.deployment import (
    KUBERNETES,
    cluster_objects,
    container_environment,
    image,
    objects,
    of_kind,
    printed_options,
)

pytestmark = pytest.mark.on_change("deploy")

KEYS = "/etc/spaceport/keys"


def pod(kind: str) -> dict[str, Any]:
    """The specification of the pods that an object describes."""
    spec: dict[str, Any] = of_kind(kind)["spec"]
    if kind == "Deployment":
        spec = spec["template"]["spec"]
    return spec["predictor"] if kind == "InferenceService" else spec


def container(kind: str) -> dict[str, Any]:
    (found,) = pod(kind)["containers"]
    return dict(found)


def test_the_service_takes_the_configuration_of_the_deployment(tmp_path: Path) -> None:
    found = container("Deployment")
    option, path = found["args"]
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    assert (option, path) == ("--config", f"{mounts['config']}/serve.toml")
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    text = (KUBERNETES / "base" / "serve.toml").read_text("utf-8")
    assert f'"{KEYS}/keys"' in text
    (tmp_path / "serve.toml").write_text(text.replace(KEYS, str(tmp_path)), "utf-8")
    printed = printed_options([option, str(tmp_path / "serve.toml")], container_environment(found))
    assert 'host = "0.0.0.0"  # environment, SPACEPORT_HOST' in printed
    assert "threads = 0  # default" in printed  # as many as the limit of the container allows
    assert f'chat = "{mounts["bundles"]}/chat.bundle"  # file' in printed
    assert "# keys that clients may send: 1" in printed
    assert [f"port = {port['containerPort']}  # env" in printed for port in found["ports"]] == [True]


def test_the_service_takes_the_configuration_of_kserve(tmp_path: Path) -> None:
    found, model, runtime = container("ServingRuntime"), pod("InferenceService")["model"], of_kind("ServingRuntime")
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    own = {each["name"]: each["value"].replace(KEYS, str(tmp_path)) for each in model["env"]}
    name = of_kind("InferenceService")["metadata"]["name"]
    arguments = [argument.replace("{{.Name}}", name) for argument in found["args"]]
    printed = printed_options(arguments, container_environment(found) | own)
    assert 'chat = "/mnt/models"' in printed
    assert "# keys that clients may send: 1" in printed
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert found["name"] == "kserve-container"  # the one into which KServe mounts the model
    claim = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    assert model["storageUri"].startswith(f"pvc://{claim}/")


@pytest.mark.parametrize("kind", ["Deployment", "ServingRuntime"])
def test_pods_are_restricted_and_probe_paths_of_the_service(kind: str) -> None:
    found, whole = container(kind), pod(kind).get("securityContext", {})
    own = found["securityContext"]
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    merged = {**whole, **own}
    assert merged["runAsNonRoot"] is True
    assert merged["seccompProfile"] == {"type": "RuntimeDefault"}
    assert image("cpu")["USER"] == [f"{merged['runAsUser']}:{merged['runAsGroup']}"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod(kind))
    assert not any("hostPath" in volume for volume in pod(kind)["volumes"])
    (writable,) = (mount["mountPath"] for mount in found["volumeMounts"] if not mount.get("readOnly"))
    assert writable == "/var/lib/spaceport"
    routes = {route.path for route in application({}).routes}
    ports = {key for port in found["ports"] for key in (port["name"], port["containerPort"])}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[name]["httpGet"]["path"] in routes
        assert found[name]["httpGet"]["port"] in ports
    assert found["livenessProbe"]["httpGet"]["path"].endswith("/live")  # a service that drains is not killed
    predictor = pod("InferenceService" if kind == "ServingRuntime" else kind)
    assert predictor["automountServiceAccountToken"] is predictor["enableServiceLinks"] is False
    drain = next(option.default for option in command.params if option.name == "drain_timeout")
    waiting = found["lifecycle"]["preStop"]["sleep"]["seconds"] if kind == "Deployment" else 0
    assert predictor["terminationGracePeriodSeconds"] >= waiting + drain + _LAST_EVENTS + 10
    limits = found["resources"]["limits"]
    assert float(limits["cpu"]) >= 1  # which the engine reads
    assert "SPACEPORT_THREADS" not in container_environment(found)


def test_objects_refer_to_each_other_by_their_names() -> None:
    assert not any("namespace" in each["metadata"] for each in cluster_objects())
    deployment, labels = of_kind("Deployment"), of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    (kustomization,) = objects(KUBERNETES / "base" / "kustomization.yaml")
    (config,) = kustomization["configMapGenerator"]
    volumes = {each["name"]: each for each in pod("Deployment")["volumes"]}
    assert volumes["config"]["configMap"]["name"] == config["name"]
    assert volumes["keys"]["secret"]["secretName"] == of_kind("Secret")["metadata"]["name"]
    claim = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["bundles"]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in pod("Deployment")["topologySpreadConstraints"]),
    ):
        assert selector == labels
    ports = {port["name"] for port in container("Deployment")["ports"]}
    assert {port["targetPort"] for port in of_kind("Service")["spec"]["ports"]} == ports
    assert {port["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]} == ports
    target = of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
