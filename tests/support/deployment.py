"""Deployment: the files for containers and clusters, read as the programs that they are for read them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from spaceport.tools.cli.serve import command as serve
from spaceport.tools.cli.serve import service_options_of
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KSERVE = DEPLOY / "kserve"
MONITORING = DEPLOY / "monitoring"
CONTAINERFILE = DEPLOY / "Containerfile"
DEFAULT_TARGET = "cpu"  # the last stage, and the target that the files name


@dataclass
class Stage:
    """A stage of the Containerfile: its instructions in order, and the one that it begins with."""

    name: str
    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)  # such as ("USER", "10001:10001")

    def of(self, instruction: str) -> list[str]:
        """The arguments of all instructions of a kind."""
        return [argument for name, argument in self.instructions if name == instruction]


def stages() -> dict[str, Stage]:
    """The stages of the Containerfile by name, in order."""
    lines = [line for line in CONTAINERFILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    found: dict[str, Stage] = {}
    stage = None
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, argument = line.split(None, 1)
        if name == "FROM":
            parent, _, alias = argument.partition(" AS ")
            stage = found[alias] = Stage(alias, parent)
        elif stage is not None:
            stage.instructions.append((name, " ".join(argument.split())))
    return found


def image(target: str) -> dict[str, list[str]]:
    """The instructions of an image with those of the stages that it is made from, by kind."""
    known, chain = stages(), []
    while target in known:
        chain.insert(0, known[target])
        target = known[target].parent
    instructions = [each for stage in chain for each in stage.instructions]
    return {name: [argument for each, argument in instructions if each == name] for name, _ in instructions}


def image_environment(target: str = DEFAULT_TARGET) -> dict[str, str]:
    """The variables that an image sets."""
    words = [word for line in image(target)["ENV"] for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def health_command() -> list[str]:
    """The command of the image's health check."""
    (check,) = image(DEFAULT_TARGET)["HEALTHCHECK"]
    command: list[str] = json.loads(check[check.index("[") :])
    return command


def objects(*files: Path) -> list[dict[str, Any]]:
    """The objects in YAML files."""
    return [each for file in files for each in yaml.safe_load_all(file.read_text("utf-8")) if each]


def cluster_objects() -> list[dict[str, Any]]:
    """The objects of all files for clusters, apart from patches and kustomizations."""
    files = [*sorted(KUBERNETES.glob("base/*.yaml")), *sorted(KUBERNETES.glob("autoscaling/*.yaml"))]
    files += [KUBERNETES / "secret.example.yaml", *sorted(KSERVE.glob("*.yaml"))]
    return objects(*(file for file in files if file.name != "kustomization.yaml"))


def of_kind(kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = (each for each in cluster_objects() if each["kind"] == kind)
    return found


def container_environment(container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container in a cluster: those of the image, and its own."""
    return image_environment() | {variable["name"]: variable["value"] for variable in container.get("env", [])}


def served_with(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that `spaceport serve` takes from arguments and an environment, with the number of keys."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPACEPORT_")]:  # those of the tests
            patch.delenv(name)
        for name, value in environment.items():
            if name.startswith("SPACEPORT_"):
                patch.setenv(name, value)
        given = serve.make_context("serve", [*arguments]).params
        return given | {"keys": len(service_options_of(given).keys)}


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard."""
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    return found


def panels() -> Iterator[dict[str, Any]]:
    """The panels of the dashboard, apart from the titles of its rows."""
    yield from (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def expressions() -> dict[str, str]:
    """All queries of the dashboard and of the alerts, by where they are."""
    found = {f"{each['title']} {query['refId']}": query["expr"] for each in panels() for query in each["targets"]}
    found |= {each["name"]: each["expr"] for each in dashboard()["annotations"]["list"]}
    (alerts,) = objects(MONITORING / "alerts.yml")
    return found | {rule["alert"]: rule["expr"] for group in alerts["groups"] for rule in group["rules"]}
