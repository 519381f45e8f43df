"""Images and Compose file: restricted, pinned, and with a health check that follows the service."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import spaceport
from spaceport.serving.server import _LAST_EVENTS
from spaceport.tools.cli.serve import command
from support.chat_runtime import chat_runtime, running_service
from support.deployment import DEPLOY, health_command, image, image_environment, objects, served_with, stages
from support.paths import ROOT

pytestmark = pytest.mark.on_change("deploy", ".dockerignore")

TARGETS = ("cpu", "gpu")
COMPOSE = objects(DEPLOY / "compose.yaml")[0]


def service() -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"]["spaceport"]
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_the_service_without_privileges_and_has_what_it_needs(target: str) -> None:
    found, environment = image(target), image_environment(target)
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
    assert environment["PYTHONDONTWRITEBYTECODE"] == environment["ORT_DISABLE_TELEMETRY"] == "1"
    assert "pip" not in " ".join(found["RUN"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the images have Python 3.13, which reads TOML files")
def test_the_list_of_requirements_is_that_of_the_project() -> None:
    (line,) = (line for line in stages()["installer"].of("RUN") if "requirements.py" in line)
    words = shlex.split(line)
    program = "\n".join(words[words.index("printf") + 2 : words.index(">")])
    command = [sys.executable, "-c", program, "cpu", "serve"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {re.split("[^a-z0-9-]", line)[0] for line in printed.splitlines()}
    assert {"numpy", "tokenizers", "click", "onnxruntime", "starlette", "uvicorn", "msgspec"} <= names
    assert not names & {"torch", "onnxruntime-gpu", "pytest", "transformers"}


def ignored(path: str) -> bool:
    """Whether the context of the images lacks a file: the last line of .dockerignore that fits decides."""
    found = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            fits = any(fnmatchcase(part, pattern[3:]) for part in path.split("/"))
        else:
            fits = pattern == "*" or f"{path}/".startswith(f"{pattern}/")
        if fits and not line.startswith("#"):
            found = not line.startswith("!")
    return found


def test_the_context_of_the_images_has_what_the_wheel_is_built_from() -> None:
    needed = "pyproject.toml constraints.txt LICENSE README.md MANIFEST.in runtime/decode/step.py serving/page/static/page.css"
    assert [path for path in needed.split() if ignored(path)] == []
    others = ".git/config .venv/bin/python tests/conftest.py keys deploy/keys/keys runtime/__pycache__/a.pyc"
    assert [path for path in others.split() if not ignored(path)] == []


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
        version = (
            r":(cpu|gpu)$"
            if container["image"].startswith("spaceport:")
            else r":v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$"
        )
        assert re.search(version, container["image"]), name
        assert set(container.get("secrets", [])) <= set(COMPOSE["secrets"]), name


def test_the_compose_file_runs_the_service_with_options_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    given = {**image_environment(), **service()["environment"]}
    defaults = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in given.items()}
    own = {name: value.replace("/run/secrets", str(tmp_path)) for name, value in defaults.items()}
    options = served_with(service()["command"], own)
    known = {f"SPACEPORT_{name.upper()}" for name in options} | {"SPACEPORT_MODELS"}
    assert [name for name in own if name.startswith("SPACEPORT_") and name not in known] == []
    assert options["bundles"] == {"chat": "/mnt/models/chat.bundle"}
    assert options["keys"] == 1
    assert service()["healthcheck"]["test"] == ["CMD", *health_command()]
    drain = next(option.default for option in command.params if option.name == "drain_timeout")
    assert int(service()["stop_grace_period"].removesuffix("s")) >= drain + _LAST_EVENTS + 10
