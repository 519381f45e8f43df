"""Doctor: it reports the backends of a machine and commands that install what is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.installation import install_command
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.device import no_gpu
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import MISSING, OK

pytestmark = pytest.mark.torch  # every backend is tried, each in a process of its own

PROGRAM = "from spaceport.tools.cli import main; main()"


def doctor(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["doctor", "--json"]) == OK
    output, errors = capfd.readouterr()
    assert errors == ""
    found: dict[str, Any] = json.loads(output)
    return found


def test_every_backend_is_ready_or_says_why_not(capfd: pytest.CaptureFixture[str]) -> None:
    found = doctor(capfd)
    backends = {entry["backend"]: entry for entry in found["backends"]}
    assert [*backends] == [*BACKENDS, "torch"]
    assert backends["onnxruntime"]["ready"]
    assert "CPUExecutionProvider" in backends["onnxruntime"]["why"]
    reason = no_gpu()
    if reason is not None:
        for name in ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda"):
            assert not backends[name]["ready"]
            assert backends[name]["why"] == f"backend {name} needs an NVIDIA GPU: {reason}"
        assert found["system"]["NVIDIA GPU"] == f"none: {reason}"
    builders = {entry["flavour"]: entry for entry in found["builders"]}
    assert [*builders] == ["tensorrt", "tensorrt-rtx"]
    for entry in builders.values():
        assert entry["version"] or "pip install" in entry["why"]
    pytest.importorskip("tensorrt_rtx")
    assert builders["tensorrt-rtx"]["version"] == version("tensorrt-rtx")
    assert {"sm80", "sm89"} <= {*builders["tensorrt-rtx"]["targets"]}


def test_its_commands_never_install_two_packages_of_onnxruntime(
    capfd: pytest.CaptureFixture[str],
) -> None:
    packages = {entry["package"]: entry for entry in doctor(capfd)["packages"]}
    cpu, gpu = packages["onnxruntime"], packages["onnxruntime-gpu"]
    assert cpu["install"] is None
    if gpu["version"] is None:
        assert gpu["install"] == f"pip uninstall -y onnxruntime && {install_command('gpu')}"


def test_two_packages_of_onnxruntime_are_a_problem(tmp_path: Path) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{package}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", PROGRAM, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (MISSING, "")
    *shown, uninstall, cpu, gpu = done.stdout.splitlines()
    problem = " ".join(line.strip() for line in shown[shown.index("Problem") + 1 :])
    assert re.fullmatch("onnxruntime and onnxruntime-gpu are both installed.*: uninstall both, then .*", problem)
    assert uninstall == "    $ pip uninstall onnxruntime onnxruntime-gpu"
    assert (cpu, gpu) == (f"    $ {install_command('cpu')}", f"    $ {install_command('gpu')}")
    assert all(len(line) <= 80 for line in shown if "$" not in line)


def test_a_library_that_crashes_its_process_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("import os\nos.abort()\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", PROGRAM, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == OK
    (entry,) = [entry for entry in json.loads(done.stdout)["backends"] if entry["backend"] == "onnxruntime"]
    assert entry == {"backend": "onnxruntime", "ready": False, "why": "the process crashed with exit code -6"}


def test_a_state_folder_that_others_may_write_to_is_a_problem(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "spaceport").mkdir()
    (tmp_path / "spaceport").chmod(0o777)
    (tmp_path / "spaceport" / "step-costs").mkdir()
    (tmp_path / "spaceport" / "step-costs").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["doctor", "--json"]) == MISSING
    problems = json.loads(capfd.readouterr().out)["problems"]
    for folder, problem in zip(("spaceport", "step-costs"), problems, strict=True):
        assert f"{folder}: other users may write to it: expected a folder of this user" in problem["problem"]
