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
from spaceport.tools.cli.serve import command
from spaceport.tools.serve.server import _LAST_EVENTS
from support.chat_runtime import chat_runtime
from support.deployment import DEPLOY, health_command, image, image_environment, objects, printed_options, stages
from support.paths import ROOT
from support.running_service import running_service

pytestmark = pytest.mark.on_change("tools/deploy", ".dockerignore")

TARGETS = ("cpu", "gpu")
COMPOSE = objects(DEPLOY / "compose.yaml")[0]


def service() -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"]["spaceport"]
    return found


def substituted(text: str) -> str:
    """A value of the Compose file with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_the_service_without_privileges_and_has_what_it_needs(target: str) -> None:
    found, environment = image(target), image_environment(target)
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
    copied = {source for line in found["COPY"] for source in re.findall(r"--from=(\S+)", line)}
    assert copied == {f"{target}-dependencies", "package"}
    (installing,) = stages()[f"{target}-dependencies"].of("RUN")
    assert f"requirements.py {target} ${{EXTRAS}} >" in installing
    assert "pip" not in " ".join(found["RUN"])


def test_every_package_has_the_version_of_the_constraints_and_the_image_that_of_the_project() -> None:
    (labels,) = image("cpu")["LABEL"]
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', labels))
    assert (found["version"], found["licenses"]) == (spaceport.__version__, "Apache-2.0")
    environment = dict(word.split("=", 1) for line in stages()["installer"].of("ENV") for word in line.split())
    assert environment["PIP_CONSTRAINT"] == "/source/constraints.txt"
    running = [line for stage in stages().values() for line in stage.of("RUN")]
    assert len([line for line in running if "pip" in line and "install" in line]) == 4
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    for name in ("pip", "setuptools", "onnxruntime", "onnxruntime-gpu", "nvidia-cudnn-cu13"):
        assert re.search(rf"^{name}==", pinned, re.MULTILINE)
    assert {stages()[name].parent for name in ("cpu-dependencies", "gpu-dependencies", "package")} == {"installer"}


def requirements(*extras: str) -> subprocess.CompletedProcess[str]:
    """What the program that the Containerfile writes prints for these extras."""
    (line,) = (line for line in stages()["installer"].of("RUN") if "requirements.py" in line)
    words = shlex.split(line)
    program = "\n".join(words[words.index("printf") + 2 : words.index(">")])
    return subprocess.run(
        [sys.executable, "-c", program, *extras], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the images have Python 3.13, which reads TOML files")
def test_the_list_of_requirements_is_that_of_the_project() -> None:
    done = requirements("cpu", "serve")
    names = {re.split("[^a-z0-9-]", line)[0] for line in done.stdout.splitlines()}
    assert {"numpy", "tokenizers", "click", "onnxruntime", "starlette", "uvicorn", "msgspec"} <= names
    assert not names & {"torch", "onnxruntime-gpu", "pytest", "transformers"}
    assert "KeyError: 'unknown'" in requirements("unknown").stderr


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
    needed = (
        "pyproject.toml constraints.txt LICENSE README.md MANIFEST.in src/spaceport/__init__.py runtime/decode/step.py"
    )
    others = ".git/config .venv/bin/python tests/conftest.py docs/README.md keys tools/deploy/keys/keys"
    assert [path for path in (*needed.split(), "tools/page/static/page.css") if ignored(path)] == []
    more = ("tools/demo_recipe/train.py", "runtime/__pycache__/a.pyc")
    assert [path for path in (*others.split(), *more) if not ignored(path)] == []


def check_health(port: int) -> int:
    """The exit status of the health check for a service on a port."""
    check = [sys.executable, *health_command()[1:]]
    return subprocess.run(check, env={"SPACEPORT_PORT": str(port)}, capture_output=True, check=False).returncode


def test_the_health_check_follows_the_service() -> None:
    with running_service({"demo": chat_runtime}) as found:
        port = int(found.url.split(":")[2].split("/")[0])
        assert check_health(port) == 0
        found.service.draining = True
        assert check_health(port) == 1
    assert check_health(port) == 1


def test_the_compose_file_restricts_every_container() -> None:
    for name, container in COMPOSE["services"].items():
        assert container["read_only"] is True, name
        assert container["cap_drop"] == ["ALL"], name
        assert container["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in container, name
        assert [port for port in container["ports"] if not port.startswith("127.0.0.1:")] == [], name
        binds = [volume for volume in container["volumes"] if volume["type"] == "bind"]
        assert all(volume["read_only"] for volume in binds), name
        assert ":" in container["image"], name


def test_the_compose_file_mounts_files_that_exist_and_secrets_that_are_defined() -> None:
    for container in COMPOSE["services"].values():
        for volume in container["volumes"]:
            if volume["type"] == "volume":
                assert volume["source"] in COMPOSE["volumes"]
            elif not volume["source"].startswith("${"):
                assert (DEPLOY / volume["source"]).exists()
        assert set(container.get("secrets", [])) <= set(COMPOSE["secrets"])
    assert (DEPLOY / service()["build"]["context"]).resolve() == ROOT
    assert (ROOT / service()["build"]["dockerfile"]).exists()
    assert service()["build"]["target"] in TARGETS
    prometheus = objects(DEPLOY / "monitoring" / "prometheus.yml")[0]
    (scraped,) = prometheus["scrape_configs"]
    assert Path(scraped["authorization"]["credentials_file"]).name in COMPOSE["services"]["prometheus"]["secrets"]
    assert scraped["static_configs"][0]["targets"] == [f"spaceport:{image_environment()['SPACEPORT_PORT']}"]


def test_the_compose_file_runs_the_service_with_options_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    given = {**image_environment(), **service()["environment"]}
    own = {name: substituted(value).replace("/run/secrets", str(tmp_path)) for name, value in given.items()}
    printed = printed_options(service()["command"], own)
    assert [name for name in own if "SPACEPORT_" in name and f"# environment, {name}" not in printed] == []
    assert 'chat = "/mnt/models/chat.bundle"' in printed
    assert "keys that clients may send: 1" in printed


def test_the_compose_file_has_the_health_check_of_the_image_and_time_to_stop() -> None:
    assert service()["healthcheck"]["test"] == ["CMD", *health_command()]
    drain = next(option.default for option in command.params if option.name == "drain_timeout")
    assert int(service()["stop_grace_period"].removesuffix("s")) >= drain + _LAST_EVENTS + 10
    (folder,) = service()["tmpfs"]
    assert folder.startswith("/var/lib/spaceport:")
