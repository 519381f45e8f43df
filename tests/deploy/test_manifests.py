"""Manifests for Kubernetes and KServe: restricted pods whose commands, ports, paths and names are those of the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.serving.application import application
from spaceport.serving.server import _LAST_EVENTS
from spaceport.tools.cli.serve import command
from support.deployment import (
    DEPLOY,
    KUBERNETES,
    cluster_objects,
    container_environment,
    image,
    objects,
    of_kind,
    served_with,
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
    options = served_with([option, str(tmp_path / "serve.toml")], container_environment(found))
    assert (options["host"], options["threads"]) == (
        "0.0.0.0",
        0,
    )  # threads: as many as the limit of the container allows
    assert options["bundles"] == {"chat": f"{mounts['bundles']}/chat.bundle"}
    assert options["keys"] == 1
    assert [port["containerPort"] for port in found["ports"]] == [options["port"]]


def test_the_service_takes_the_configuration_of_kserve(tmp_path: Path) -> None:
    found, model, runtime = container("ServingRuntime"), pod("InferenceService")["model"], of_kind("ServingRuntime")
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    own = {each["name"]: each["value"].replace(KEYS, str(tmp_path)) for each in model["env"]}
    name = of_kind("InferenceService")["metadata"]["name"]
    arguments = [argument.replace("{{.Name}}", name) for argument in found["args"]]
    options = served_with(arguments, container_environment(found) | own)
    assert options["bundles"] == {"chat": "/mnt/models"}
    assert options["keys"] == 1
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


def test_pods_of_ray_are_as_restricted_as_those_of_the_deployment() -> None:
    service, policy = objects(DEPLOY / "ray" / "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        (found,) = spec["containers"]
        assert group["template"]["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
        for name in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
            assert spec[name] == pod("Deployment")[name], name
        assert found["securityContext"] == container("Deployment")["securityContext"]
        assert {port["name"] for port in found["ports"]} <= {"gcs", "dashboard", "serve"}  # no port of Ray's client
        assert found["resources"]["limits"].keys() == container("Deployment")["resources"]["limits"].keys()
        volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
        writable = {
            mount["mountPath"]: volumes[mount["name"]] for mount in found["volumeMounts"] if "readOnly" not in mount
        }
        assert writable.keys() == {"/tmp", "/var/lib/spaceport"}
        assert all(volume["emptyDir"].keys() == {"sizeLimit"} for volume in writable.values())
    shared = {volume.pop("name"): volume for volume in pod("Deployment")["volumes"]}
    assert {name: volumes[name] for name in ("bundles", "keys")} == {name: shared[name] for name in ("bundles", "keys")}


def test_only_the_operator_reaches_more_of_ray_than_the_service_and_its_metrics() -> None:
    _, policy = objects(DEPLOY / "ray" / "rayservice.yaml")
    own = [{"podSelector": policy["spec"]["podSelector"]}]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    inner, *outer = policy["spec"]["ingress"]
    assert inner == {"from": own}
    ports = {json.dumps(rule["from"]): [port["port"] for port in rule["ports"]] for rule in outer}
    assert sorted(ports.values(), key=str) == [["dashboard", "serve"], ["serve"], [8080]]
    (operator,) = (peer for peer, names in ports.items() if "dashboard" in names)
    assert json.loads(operator) == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}}}
    ]
    clients, monitoring = of_kind("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert ports.keys() == {operator, json.dumps([clients]), json.dumps([monitoring])}
    inside, names = policy["spec"]["egress"]
    assert inside == {"to": own}
    assert {port["port"] for port in names["ports"]} == {53}


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
