"""Schemas: manifests and the Compose file have no field that Kubernetes or Compose do not know."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deployment import DEPLOY, KSERVE, KUBERNETES, cluster_objects, objects, of_kind

VERSIONS = ("1.30.0", "1.37.0")  # of Kubernetes: the oldest one that the manifests support, and the last one
OF_KSERVE = {"ServingRuntime", "InferenceService"}  # whose schemas are in no package

pytestmark = [
    pytest.mark.on_change("deploy"),
    pytest.mark.nightly,
    pytest.mark.skipif(
        not all(map(find_spec, ("check_jsonschema", "jsonschema", "kubernetes_validate"))),
        reason="no schemas: pip install --no-deps -r tests/deploy/requirements.txt",
    ),
]


def manifest_errors(found: dict[str, Any], version: str = VERSIONS[-1]) -> list[str]:
    """What an object for a cluster has that its schema does not allow."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def test_manifests_and_the_compose_file_have_known_fields_only() -> None:
    import check_jsonschema
    import jsonschema

    _, policy = objects(DEPLOY / "ray" / "rayservice.yaml")
    for found in (*cluster_objects(), policy):
        for version in VERSIONS if found["kind"] not in OF_KSERVE else ():
            assert manifest_errors(found, version) == [], found["kind"]
    broken = of_kind("Deployment")
    broken["spec"]["replica"] = 2
    assert manifest_errors(broken) != []
    vendored = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text("utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    (document,) = objects(DEPLOY / "compose.yaml")
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)] == []


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl: apt-get install kubernetes-client")
def test_what_kustomizations_build_is_complete() -> None:
    for folder in (KUBERNETES / "base", KUBERNETES / "gpu", KSERVE):
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}
        if folder == KSERVE:
            assert found.keys() == OF_KSERVE
            continue
        assert {kind: manifest_errors(each) for kind, each in found.items()} == {kind: [] for kind in found}
        (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"spaceport:{'gpu' if folder.name == 'gpu' else 'cpu'}"
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) is (folder.name == "gpu")
