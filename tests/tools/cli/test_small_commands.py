"""`spaceport doctor`, `inspect`, `sign`, `fetch` and `plan`: what they show and change, and their errors."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from spaceport.exporter.bundle_manifest import PRIVATE_FILE, PUBLIC_FILE
from spaceport.exporter.tensorrt.engines import store_engine
from spaceport.graphs.contract.ed25519 import SIGNATURE_FILE, read_public_key
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.manifest import DATA_FILE, ENGINES_FOLDER
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.built_engines import record_built_engine
from spaceport.runtime.backends.machine import no_gpu
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli import INPUT, MISSING, OK, USAGE, Commands, doctor, run
from spaceport.tools.cli.bundles import facts, states
from support.small_bundle import ENGINE, RECORD, new_bundle

Capture = pytest.CaptureFixture[str]


PLAN = b"an engine"
OPENING = ("generate", "inspect", "audit", "plan")


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is tried in a process of its own."""
    monkeypatch.setattr(doctor, "_probe", lambda code, name: (code is doctor.PROBE, [name]))
    monkeypatch.setattr(doctor, "_formats", list)


@pytest.mark.torch  # every backend is tried
def test_every_backend_is_ready_or_says_why_not(capfd: Capture) -> None:
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
    assert [entry["flavour"] for entry in found["builders"]] == ["tensorrt", "tensorrt-rtx"]


def test_two_packages_of_onnxruntime_are_a_problem(
    no_probes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{package}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["doctor"]) == MISSING
    shown = capfd.readouterr().out.splitlines()
    first = shown.index("    $ pip uninstall onnxruntime onnxruntime-gpu")
    shown, repairs = shown[:first], shown[first + 1 :]
    problem = " ".join(line.strip() for line in shown[shown.index("Problem") + 1 :])
    assert re.fullmatch("onnxruntime and onnxruntime-gpu are both installed.*: uninstall both, then .*", problem)
    assert repairs == [f"    $ {install_command(extra)}" for extra in ("cpu", *(() if no_gpu() else ("gpu",)))]
    assert all(len(line) <= 80 for line in shown if "$" not in line)


@pytest.mark.parametrize("reason", [None, "no NVIDIA driver here"])
def test_packages_for_a_gpu_are_offered_where_there_is_one(
    no_probes: None, monkeypatch: pytest.MonkeyPatch, capfd: Capture, reason: str | None
) -> None:
    monkeypatch.setattr(doctor, "no_gpu", lambda: reason)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    run(["doctor"])
    shown = capfd.readouterr().out
    for extra in ("gpu", "tensorrt", "tensorrt-rtx"):
        assert (install_command(extra) in shown) == (reason is None)
    assert install_command("cpu") in shown


def test_a_library_that_crashes_its_process_is_not_ready() -> None:
    assert doctor._probe("import os; os.abort()", "") == (False, ["the process crashed with exit code -6"])
    assert doctor._probe("import sys; print(3); sys.exit('no ' + sys.argv[1])", "gpu") == (False, ["no gpu"])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert run(["sign", "--new-key", str(tmp_path / "keys")]) == OK
    return tmp_path / "keys"


def shown(capfd: Capture, bundle: Path, name: str) -> list[str]:
    """The rows of `inspect` that begin with a name, without it."""
    capfd.readouterr()
    assert run(["inspect", str(bundle)]) == OK
    lines = capfd.readouterr().out.splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("changes", "drafts"),
    [
        ({}, "mask slots and prompt lookup, tune, a/b"),
        ({"name": "unknown", "adapter": None}, "mask slots and prompt lookup"),
        ({"name": "medusa", "adapter": None, "predictor": "head"}, "draft heads and prompt lookup, medusa"),
        ({"name": "lookup", "adapter": None, "max_tokens": 0}, "prompt lookup"),
    ],
)
def test_inspect_says_what_drafts(changes: dict[str, Any], drafts: str, bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert facts(replace(manifest, drafts=replace(manifest.drafts, **changes)))["drafts by"] == drafts


def test_an_engine_is_built_here_or_elsewhere_changed_or_missing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    digest = hashlib.sha256(PLAN).hexdigest()
    record = replace(RECORD, graph=read_manifest(bundle).graph, sha256=digest, size=len(PLAN))
    store_engine(bundle, ENGINE, memoryview(PLAN), record)
    opened, file = open_bundle(bundle), bundle / ENGINES_FOLDER / ENGINE
    assert states(opened) == {ENGINE: "built elsewhere"}
    record_built_engine(digest)
    assert states(opened) == {ENGINE: "built here"}
    other = replace(opened.manifest.engines[ENGINE], graph=("0" * 64, "1" * 64))
    assert states(replace(opened, manifest=replace(opened.manifest, engines={ENGINE: other}))) == {
        ENGINE: "of another graph"
    }
    for content in (PLAN[:-1], b"an Engine"):
        file.write_bytes(content)
        assert states(opened) == {ENGINE: "changed"}
    assert shown(capfd, bundle, ENGINE)[0].endswith("tensorrt-rtx 1.7.1.116  changed")
    assert run(["inspect", str(bundle), "--json"]) == OK
    assert json.loads(capfd.readouterr().out)["engine_states"] == {ENGINE: "changed"}
    file.unlink()
    assert states(opened) == {ENGINE: "missing"}


def test_a_signed_bundle_is_shown_and_opened_with_its_key_until_it_changes(
    bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    keys = tmp_path / "keys"
    assert run(["sign", "--new-key", str(keys)]) == OK
    created = capfd.readouterr().out
    fingerprint = read_public_key(keys / PUBLIC_FILE).fingerprint
    assert f"{keys / PUBLIC_FILE}: public key {fingerprint}\n" in created
    inspect = ["inspect", str(bundle), "--require-signature", str(keys / PUBLIC_FILE)]
    sign = ["sign", str(bundle), "--key", str(keys / PRIVATE_FILE)]
    assert shown(capfd, bundle, "signed by") == ["nobody (no signature)"]
    assert run(inspect) == INPUT
    assert "has no signature" in capfd.readouterr().err
    assert run(sign) == OK
    assert capfd.readouterr().out == f"{bundle}: signed with key {fingerprint}\n"
    assert shown(capfd, bundle, "signed by") == [f"key {fingerprint}"]
    assert run([*inspect, "--json"]) == OK
    signed = json.loads(capfd.readouterr().out)["signed"]
    assert signed == {"signed": True, "valid": True, "key": fingerprint, "problem": ""}
    store_engine(bundle, ENGINE, memoryview(b"engine!"), replace(RECORD, graph=read_manifest(bundle).graph))
    assert shown(capfd, bundle, "signed by")[0].startswith("INVALID: not a signature of this manifest")
    assert run(inspect) == INPUT
    assert (run(sign), run(inspect)) == (OK, OK)
    (bundle / SIGNATURE_FILE).unlink()
    (bundle / DATA_FILE).write_bytes(b"other weights")
    assert run(sign) == INPUT
    assert "the manifest says" in capfd.readouterr().err
    assert not (bundle / SIGNATURE_FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("sign", USAGE, "no BUNDLE: expected BUNDLE with --key PRIVATE_KEY, or --new-key FOLDER"),
        ("sign BUNDLE --new-key FOLDER", USAGE, "creates a key pair and signs nothing: leave BUNDLE and --key out"),
        ("sign BUNDLE --key missing.pem", INPUT, "missing.pem: No such file or directory: expected a readable"),
        ("sign BUNDLE --key PUBLIC", INPUT, "is a public key: expected the private key"),
        ("fetch BUNDLE/nothing FOLDER", INPUT, "no manifest.json there: expected the address of a bundle's folder"),
        ("fetch https://user:word@host/a FOLDER", USAGE, "user"),
        ("plan FOLDER", INPUT, "no such folder"),
        ("plan FOLDER --requests 0", USAGE, "--requests is 0"),
        (
            "plan FOLDER --acceptance 0.5,-1",
            USAGE,
            "--acceptance is '0.5,-1': expected comma-separated numbers from 0 to 1",
        ),
    ],
)
def test_mistakes_are_refused_with_what_to_do(
    bundle: Path, keys: Path, capfd: Capture, arguments: str, code: int, message: str
) -> None:
    named = {"BUNDLE": bundle, "FOLDER": bundle.with_name("new"), "PUBLIC": keys / PUBLIC_FILE}
    words = [str(named.get(word, word)).replace("BUNDLE", str(bundle)) for word in arguments.split()]
    assert run(words) == code
    assert message in capfd.readouterr().err
    assert not (bundle / SIGNATURE_FILE).exists()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["check", "build", *OPENING])
def test_every_command_that_opens_a_bundle_can_require_a_signature(
    name: str, bundle: Path, keys: Path, capfd: Capture
) -> None:
    command = Commands("spaceport").get_command(click.Context(click.Command("spaceport")), name)
    assert command is not None
    flags = [flag for option in command.params if isinstance(option, click.Option) for flag in option.opts]
    assert "--require-signature" in flags
    if name in OPENING:
        prompts = bundle.with_name("prompts.jsonl")
        prompts.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}\n')
        rest = {"generate": ["a"], "distill": [str(prompts), str(prompts) + "l"], "inspect": [], "plan": []}
        arguments = [*rest.get(name, [str(prompts)]), "--require-signature", str(keys / PUBLIC_FILE)]
        assert run([name, str(bundle), *arguments]) == INPUT
        assert "has no signature" in capfd.readouterr().err


def test_fetch_reports_what_it_did_and_plan_the_drafts_that_pay_off(
    tmp_path: Path, bundle: Path, tiny_bundle: Path, capfd: Capture
) -> None:
    fetch = ["fetch", str(bundle), str(tmp_path / "copy")]
    assert run([*fetch, "--json"]) == OK
    found = json.loads(capfd.readouterr().out)
    assert found["fetched_bytes"] == found["total_bytes"] > 2048
    assert run(fetch) == OK
    assert "has the bundle already" in capfd.readouterr().out
    plan = ["plan", str(tiny_bundle), "--threads", "1"]
    assert run([*plan, "--acceptance", "0.79", "--acceptance", "0.9,0.5"]) == OK
    assert "Acceptance rate 0.9, 0.5: " in capfd.readouterr().out
    assert run([*plan, "--requests", "2", "--json"]) == OK
    found = json.loads(capfd.readouterr().out)
    assert (found["requests"], found["context"], found["rows"][0]["ratio"]) == (2, 256, 1.0)
    assert [drafts["acceptance"][0] for drafts in found["drafts"]] == [0.5, 0.7, 0.9]
    assert [step["at_hand"] for step in found["drafts"][0]["steps"]] == [0, 1, 2, 3, 4, 5]
