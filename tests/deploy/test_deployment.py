"""Files for containers: restricted and pinned, with options, health checks and metrics that the service has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import spaceport
from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from spaceport.serving.server import _LAST_EVENTS
from spaceport.tools.cli.serve import command, service_options_of
from support.chat_runtime import chat_runtime, running_service, wait_until
from support.container_image import health_command, instructions, is_ignored, variables
from support.paths import DEPLOY, PARTS, ROOT

pytestmark = pytest.mark.on_change("deploy", "serving", ".dockerignore")

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICE: dict[str, Any] = COMPOSE["services"]["spaceport"]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_runs_the_service_without_privileges_and_has_what_it_needs(target: str) -> None:
    found, environment = instructions(target), variables(target)
    assert f'version="{spaceport.__version__}"' in found["LABEL"][0]
    (user,) = found["USER"]
    assert all(number.isdigit() and int(number) > 0 for number in user.split(":"))
    entry = json.loads(found["ENTRYPOINT"][0])  # a list: no shell gets the signal
    assert entry == ["/opt/spaceport/bin/spaceport", "serve"]
    assert found["STOPSIGNAL"] == ["SIGTERM"]
    assert found["EXPOSE"] == [environment["SPACEPORT_PORT"]]
    state = "/var/lib/spaceport"  # the only folder that is written to
    assert f"install -d -m 1777 {state}" in found["RUN"]
    assert all(environment[name].startswith(state) for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"))
    assert "pip" not in " ".join(found["RUN"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the images have Python 3.13, which reads TOML files")
def test_the_list_of_requirements_is_that_of_the_project() -> None:
    (line,) = (line for line in instructions("installer")["RUN"] if "requirements.py" in line)
    words = shlex.split(line)
    program = "\n".join(words[words.index("printf") + 2 : words.index(">")])
    arguments = [sys.executable, "-c", program, "cpu", "serve"]
    printed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {re.split("[^a-z0-9-]", line)[0] for line in printed.splitlines()}
    assert {"numpy", "tokenizers", "click", "onnxruntime", "starlette", "uvicorn", "msgspec"} <= names
    assert not names & {"torch", "onnxruntime-gpu", "pytest", "transformers"}


def test_the_context_of_the_images_has_what_the_wheel_is_built_from() -> None:
    needed = "pyproject.toml constraints.txt LICENSE README.md MANIFEST.in runtime/decode/step.py serving/page/static/page.css"
    assert [path for path in (*needed.split(), *PARTS) if is_ignored(path)] == []
    others = ".git/config .venv/bin/python tests/conftest.py keys deploy/keys/keys runtime/__pycache__/a.pyc"
    assert [path for path in others.split() if not is_ignored(path)] == []


def test_the_health_check_follows_the_service() -> None:
    def status(port: int) -> int:
        check = [sys.executable, *health_command()[1:]]
        return subprocess.run(check, env={"SPACEPORT_PORT": str(port)}, capture_output=True, check=False).returncode

    with running_service({"demo": chat_runtime}) as found:
        port = int(found.url.split(":")[2].split("/")[0])
        assert status(port) == 0
        found.service.draining = True
        assert status(port) == 1


def test_the_compose_file_restricts_every_container() -> None:
    for name, container in COMPOSE["services"].items():
        assert container["read_only"] is True, name
        assert container["cap_drop"] == ["ALL"], name
        assert container["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in container, name
        assert all(port.startswith("127.0.0.1:") for port in container["ports"]), name
        binds = [volume for volume in container["volumes"] if volume["type"] == "bind"]
        assert all(volume["read_only"] for volume in binds), name
        assert re.search(r"spaceport:(cpu|gpu)$|:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$", container["image"]), name
        assert set(container.get("secrets", [])) <= set(COMPOSE["secrets"]), name


def test_the_compose_file_runs_the_service_with_options_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    for name, value in {**variables(), **SERVICE["environment"]}.items():
        if name.startswith("SPACEPORT_"):
            monkeypatch.setenv(name, value.replace("/run/secrets", str(tmp_path)))
    options = command.make_context("serve", [*SERVICE["command"]]).params
    known = {f"SPACEPORT_{name.upper()}" for name in options}
    assert [name for name in SERVICE["environment"] if name.startswith("SPACEPORT_") and name not in known] == []
    assert options["bundles"] == {"chat": "/mnt/models/chat.bundle"}
    assert service_options_of(options).keys == ("sk-1",)
    assert SERVICE["healthcheck"]["test"] == ["CMD", *health_command()]
    drain = next(option.default for option in command.params if option.name == "drain_timeout")
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) >= drain + _LAST_EVENTS + 10


def test_every_alert_names_metrics_and_labels_of_a_service() -> None:
    with TestClient(application({"demo": chat_runtime}, ServiceOptions(audit_rate=1.0))) as client:
        given = {"prompt": "import json\n", "temperature": 0, "max_tokens": 4}
        assert client.post("/v1/completions", json=given).status_code == 200
        wait_until(lambda: 'exactness_equal_total{model_name="demo"} 1.0' in client.get("/metrics").text)
        client.app.state.service.draining = True  # type: ignore[attr-defined]
        assert client.post("/v1/completions", json=given).status_code == 503
        text = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    exported = {name: {"instance", "job"} for name in ("up", *(sample.name for sample in samples))}
    for sample in samples:
        exported[sample.name] |= {*sample.labels}
    (alerts,) = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in alerts["rules"]:
        ((name, matchers),) = re.findall(r"\b((?:spaceport:|process_)\w+|up)\b(?:\{([^}]*)\})?", rule["expr"])
        labels = {
            *re.findall(r'(\w+)="', matchers),
            *re.findall(r"\w+", "".join(re.findall(r"by \((.*?)\)", rule["expr"]))),
        }
        assert labels <= exported[name], rule["alert"]
