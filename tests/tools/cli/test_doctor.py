"""Doctor: it reports the backends of a machine and commands that install what is missing."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.installation import install_command
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.device import no_gpu
from spaceport.tools.cli import doctor, run
from spaceport.tools.cli.exit_codes import MISSING, OK

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is tried in a process of its own."""
    monkeypatch.setattr(doctor, "_probe", lambda code, name: (code is doctor.PROBE, [name]))
    monkeypatch.setattr(doctor, "_formats", list)


@pytest.mark.torch  # every backend is tried
def test_every_backend_is_ready_or_says_why_not_and_onnxruntime_is_not_installed_twice(capfd: Capture) -> None:
    assert run(["doctor", "--json"]) == OK
    output, errors = capfd.readouterr()
    assert errors == ""
    found: dict[str, Any] = json.loads(output)
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
    packages = {entry["package"]: entry for entry in found["packages"]}
    assert packages["onnxruntime"]["install"] is None
    if packages["onnxruntime-gpu"]["version"] is None:
        assert packages["onnxruntime-gpu"]["install"] == f"pip uninstall -y onnxruntime && {install_command('gpu')}"
    builders = {entry["flavour"]: entry for entry in found["builders"]}
    assert [*builders] == ["tensorrt", "tensorrt-rtx"]
    for entry in builders.values():
        assert entry["version"] or "pip install" in entry["why"]
    pytest.importorskip("tensorrt_rtx")
    assert builders["tensorrt-rtx"]["version"] == version("tensorrt-rtx")
    assert {"sm80", "sm89"} <= {*builders["tensorrt-rtx"]["targets"]}


def test_two_packages_of_onnxruntime_are_a_problem(
    no_probes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{package}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["doctor"]) == MISSING
    *shown, uninstall, cpu, gpu = capfd.readouterr().out.splitlines()
    problem = " ".join(line.strip() for line in shown[shown.index("Problem") + 1 :])
    assert re.fullmatch("onnxruntime and onnxruntime-gpu are both installed.*: uninstall both, then .*", problem)
    assert uninstall == "    $ pip uninstall onnxruntime onnxruntime-gpu"
    assert (cpu, gpu) == (f"    $ {install_command('cpu')}", f"    $ {install_command('gpu')}")
    assert all(len(line) <= 80 for line in shown if "$" not in line)


def test_a_library_that_crashes_its_process_is_not_ready() -> None:
    assert doctor._probe("import os; os.abort()", "") == (False, ["the process crashed with exit code -6"])
    assert doctor._probe("import sys; print(3); sys.exit('no ' + sys.argv[1])", "gpu") == (False, ["no gpu"])


def test_a_state_folder_that_others_may_write_to_is_a_problem(
    no_probes: None, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for folder in (tmp_path / "spaceport", tmp_path / "spaceport" / "step-costs"):
        folder.mkdir()
        folder.chmod(0o777)
    assert run(["doctor", "--json"]) == MISSING
    problems = json.loads(capfd.readouterr().out)["problems"]
    for name, problem in zip(("spaceport", "step-costs"), problems, strict=True):
        assert f"{name}: other users may write to it: expected a folder of this user" in problem["problem"]
