"""`spaceport doctor` and `inspect`: what they show and change, and their errors."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.tensorrt.engines import store_engine
from spaceport.graphs.contract.manifest import ENGINES_FOLDER
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.built_engines import record_built_engine
from spaceport.runtime.backends.machine import no_gpu
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli import MISSING, OK, doctor, run
from spaceport.tools.cli.inspect import facts, states
from support.native_operators import library
from support.small_bundle import ENGINE, RECORD, new_bundle

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is tried in a process of its own."""
    monkeypatch.setattr(doctor, "_probe", lambda code, name: (code is doctor.PROBE, [name]))
    monkeypatch.setattr(doctor, "_native", lambda: (None, None))


@pytest.mark.torch  # every backend is tried
def test_every_backend_is_ready_or_says_why_not(capfd: Capture) -> None:
    assert run(["doctor", "--json"]) == OK
    output, errors = capfd.readouterr()
    assert errors == ""
    found: dict[str, Any] = json.loads(output)
    backends = {entry["backend"]: entry for entry in found["backends"]}
    assert [*backends] == [*BACKENDS]
    assert backends["onnxruntime"]["ready"]
    assert "CPUExecutionProvider" in backends["onnxruntime"]["why"]
    reason = no_gpu()
    if reason is not None:
        for name in ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda"):
            assert not backends[name]["ready"]
            assert backends[name]["why"] == f"backend {name} needs an NVIDIA GPU: {reason}"
        assert found["system"]["NVIDIA GPU"] == f"none: {reason}"


def test_two_packages_of_onnxruntime_are_a_problem(
    no_probes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{package}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["doctor"]) == MISSING
    (problem,) = re.findall("^problem: (.*)", capfd.readouterr().out, re.MULTILINE)
    assert problem.startswith("onnxruntime and onnxruntime-gpu are both installed")
    assert "pip uninstall onnxruntime onnxruntime-gpu" in problem


def test_without_a_ready_backend_doctor_fails(no_probes: None, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda code, name: (False, [f"no {name}"]))
    assert run(["doctor"]) == MISSING
    assert "problem: " not in capfd.readouterr().out


def test_a_library_that_crashes_its_process_is_not_ready() -> None:
    assert doctor._probe("import os; os.abort()", "") == (False, ["the process crashed with exit code -6"])
    assert doctor._probe("import sys; print(3); sys.exit('no ' + sys.argv[1])", "gpu") == (False, ["no gpu"])


def native_operators(capfd: Capture) -> tuple[str, str]:
    """What doctor says of the native operators, and its problems."""
    run(["doctor"])
    output = capfd.readouterr().out
    (shown,) = re.findall("^native operators +(.*)", output, re.MULTILINE)
    return shown, "".join(re.findall("^problem: (.*)", output, re.MULTILINE))


@pytest.mark.parametrize(
    ("probed", "expected"),
    [
        ("null", "none, formats for them are slower: install g++ or clang, or pip install ziglang, then "),
        (
            {"library": "l.so", "version": 3, "instruction_set": "avx2", "instruction_sets": ["avx2", "portable"]},
            "version 3, avx2 (also portable: SPACEPORT_KERNELS)",
        ),
    ],
)
def test_the_native_operators_are_named_or_how_to_get_them(
    probed: object, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    said = probed if isinstance(probed, str) else json.dumps(probed)
    monkeypatch.setattr(doctor, "_probe", lambda code, name: (code is doctor.NATIVE, [said]))
    shown, problem = native_operators(capfd)
    assert shown.startswith(expected)
    assert problem == ""


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_native_operators_that_cannot_run_are_a_problem(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(
        doctor, "NATIVE", doctor.NATIVE.replace("native.library_path()", f"native.Path({str(library())!r})")
    )
    monkeypatch.setenv("SPACEPORT_KERNELS", "sse9")
    shown, problem = native_operators(capfd)
    assert shown.startswith("SPACEPORT_KERNELS is sse9: this processor has ")
    assert problem == shown


@pytest.mark.parametrize(
    ("changes", "drafts"),
    [
        ({}, "mask slots and prompt lookup, tune, a/b"),
        ({"name": "unknown", "adapter": None}, "mask slots and prompt lookup"),
        ({"name": "medusa", "adapter": None, "predictor": "head"}, "draft heads and prompt lookup, medusa"),
        ({"name": "lookup", "adapter": None, "max_tokens": 0}, "prompt lookup"),
    ],
)
def test_inspect_says_what_drafts(changes: dict[str, Any], drafts: str, tmp_path: Path) -> None:
    manifest = read_manifest(new_bundle(tmp_path / "bundle"))
    assert facts(replace(manifest, drafts=replace(manifest.drafts, **changes)))["drafts by"] == drafts


def test_an_engine_is_built_here_or_elsewhere_changed_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    bundle, plan = new_bundle(tmp_path / "bundle"), b"an engine"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    digest = hashlib.sha256(plan).hexdigest()
    record = replace(RECORD, graph=read_manifest(bundle).graph, sha256=digest, size=len(plan))
    store_engine(bundle, ENGINE, memoryview(plan), record)
    opened, file = open_bundle(bundle), bundle / ENGINES_FOLDER / ENGINE
    assert states(opened) == {ENGINE: "built elsewhere"}
    record_built_engine(digest)
    assert states(opened) == {ENGINE: "built here"}
    other = replace(opened.manifest.engines[ENGINE], graph=("0" * 64, "1" * 64))
    assert states(replace(opened, manifest=replace(opened.manifest, engines={ENGINE: other}))) == {
        ENGINE: "of another graph"
    }
    for content in (plan[:-1], b"an Engine"):
        file.write_bytes(content)
        assert states(opened) == {ENGINE: "changed"}
    assert run(["inspect", str(bundle)]) == OK
    assert re.search(rf"^{re.escape(ENGINE)} .* tensorrt-rtx 1.7.1.116  changed$", capfd.readouterr().out, re.MULTILINE)
    assert run(["inspect", str(bundle), "--json"]) == OK
    assert json.loads(capfd.readouterr().out)["engine_states"] == {ENGINE: "changed"}
    file.unlink()
    assert states(opened) == {ENGINE: "missing"}
