"""Schemas: manifests and the Compose file have no field that Kubernetes, KServe or Compose do not know."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deployment import DEPLOY, KSERVE, KUBERNETES, cluster_objects, objects, of_kind
from support.kserve_schema import kserve_schema

PACKAGES = ("check_jsonschema", "jsonschema", "kserve", "kubernetes_validate")
VERSIONS = ("1.30.0", "1.37.0")  # of Kubernetes: the oldest one that the manifests support, and the last one
KSERVE_KINDS = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}
KUSTOMIZATIONS = ("base", "gpu")

pytestmark = [
    pytest.mark.on_change("tools/deploy"),
    pytest.mark.nightly,
    pytest.mark.skipif(
        not all(map(find_spec, PACKAGES)),
        reason="no schemas: pip install --no-deps -r tests/tools/deploy/requirements.txt",
    ),
]


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def errors(schema: dict[str, Any], document: Any) -> list[str]:
    """What a document has that its schema does not allow."""
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def manifest_errors(found: dict[str, Any], version: str = VERSIONS[-1]) -> list[str]:
    """What an object for a cluster has that its schema does not allow."""
    if found["kind"] in KSERVE_KINDS:
        folder = folder_of("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
        definitions = json.loads((folder / "_definitions.json").read_text("utf-8"))["$defs"]
        return errors(kserve_schema(KSERVE_KINDS[found["kind"]], definitions), found)
    import kubernetes_validate

    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", cluster_objects(), ids=lambda found: found["kind"])
def test_an_object_is_one_that_the_cluster_takes(found: dict[str, Any], version: str) -> None:
    assert manifest_errors(found, version) == []


def change(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a path such as spec/containers/0/image."""
    changed = copy.deepcopy(document)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    at: Any = changed
    for key in parents:
        at = at[key]
    at[last] = value
    return changed


POD = "spec/template/spec"
BROKEN: list[tuple[str, str, Any]] = [
    ("Deployment", "spec/replica", 2),
    ("Deployment", "spec/replicas", "two"),
    ("Deployment", f"{POD}/containers/0/securityContext/readOnlyRootFileSystem", True),
    ("Deployment", f"{POD}/containers/0/lifecycle/preStop/sleep", {"second": 5}),
    ("HorizontalPodAutoscaler", "spec/metrics/0/pods/metric", {"names": "x"}),
    ("NetworkPolicy", "spec/ingress/0/ports/0/protocol", 6),
    ("PersistentVolumeClaim", "spec/accessModes", "ReadWriteMany"),
    ("ServingRuntime", "spec/supportedModelFormat", []),
    ("ServingRuntime", "spec/containers/0/readinessProbe/httpGet/url", "/v2/health/ready"),
    ("InferenceService", "spec/predictor/model/storageURI", "pvc://a"),
    ("InferenceService", "spec/predictor/minReplicas", "1"),
    ("InferenceService", "spec/predictor/volumes/0/secret/name", "keys"),
]


def test_a_broken_field_of_a_manifest_is_found() -> None:
    for kind, path, value in BROKEN:
        assert manifest_errors(change(of_kind(kind), path, value)) != [], (kind, path)


def built(folder: Path) -> list[dict[str, Any]]:
    """The objects that kubectl applies for a kustomization."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl: apt-get install kubernetes-client")


@needs_kubectl
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_what_a_kustomization_builds_is_complete(name: str) -> None:
    found = {each["kind"]: each for each in built(KUBERNETES / name)}
    assert {kind: manifest_errors(each) for kind, each in found.items()} == {kind: [] for kind in found}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["image"] == f"spaceport:{'gpu' if name == 'gpu' else 'cpu'}"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) is (name == "gpu")
    config = next(volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume)
    assert config == found["ConfigMap"]["metadata"]["name"] != "spaceport-config"
    assert list(found["ConfigMap"]["data"]) == ["serve.toml"]


@needs_kubectl
def test_the_autoscaler_replaces_the_number_of_replicas(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    own = {"resources": ["../kubernetes/base"], "components": ["../kubernetes/autoscaling"]}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    found = {each["kind"]: each for each in built(tmp_path / "own")}
    assert "replicas" not in found["Deployment"]["spec"]
    assert manifest_errors(found["HorizontalPodAutoscaler"]) == []
    assert {each["kind"] for each in built(KSERVE)} == set(KSERVE_KINDS)


def compose_errors(document: Any) -> list[str]:
    schema = json.loads(
        (folder_of("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text("utf-8")
    )
    return errors(schema, document)


def test_the_compose_file_follows_the_specification() -> None:
    (document,) = objects(DEPLOY / "compose.yaml")
    assert compose_errors(document) == []
    for path, value in (
        ("services/spaceport/read_onlyy", True),
        ("services/spaceport/stop_grace_period", 60),
        ("services/prometheus/cap_drop", "ALL"),
        ("services/grafana/volumes/0/type", "binds"),
        ("secrets/keys/path", "x"),
    ):
        assert compose_errors(change(document, path, value)) != [], path
