"""Inspect: it shows the state of each engine in the manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.tensorrt.engines import store_engine
from spaceport.graphs.contract.manifest import ENGINES_FOLDER
from spaceport.runtime.backends import trust
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from spaceport.tools.cli.inspect import states
from support.small_bundle import ENGINE, RECORD, edit, fill, new_bundle

PLAN = b"an engine"


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with an engine that was not built on this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "bundle"
    folder.mkdir()
    manifest = fill(folder)
    record = replace(RECORD, graph=manifest.graph, sha256=hashlib.sha256(PLAN).hexdigest(), size=len(PLAN))
    store_engine(folder, ENGINE, memoryview(PLAN), record)
    return folder


def test_an_engine_is_built_here_or_elsewhere_changed_or_missing(bundle: Path) -> None:
    opened, file = open_bundle(bundle), bundle / ENGINES_FOLDER / ENGINE
    assert states(opened) == {ENGINE: "built elsewhere"}
    trust.remember(hashlib.sha256(PLAN).hexdigest())
    assert states(opened) == {ENGINE: "built here"}
    other = replace(opened.manifest.engines[ENGINE], graph=("0" * 64, "1" * 64))
    assert states(replace(opened, manifest=replace(opened.manifest, engines={ENGINE: other}))) == {
        ENGINE: "of another graph"
    }
    for content in (b"an Engine", PLAN[:-1]):
        file.write_bytes(content)
        assert states(opened) == {ENGINE: "changed"}
    file.unlink()
    assert states(opened) == {ENGINE: "missing"}


def test_the_table_and_the_json_show_the_state(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (bundle / ENGINES_FOLDER / ENGINE).write_bytes(b"an Engine")
    assert run(["inspect", str(bundle)]) == OK
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith(ENGINE)]
    assert line.endswith("tensorrt-rtx 1.7.1.116  changed")
    assert run(["inspect", str(bundle), "--json"]) == OK
    shown: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert shown["engine_states"] == {ENGINE: "changed"}


def test_the_table_shows_the_measured_acceptance_of_each_temperature(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = new_bundle(tmp_path / "bundle")

    def add(manifest_data: dict[str, Any]) -> None:
        (greedy,) = manifest_data["acceptance"]
        manifest_data["acceptance"] = [greedy, {**greedy, "temperature": 0.7, "tokens": 99}]

    edit(bundle, add)
    assert run(["inspect", str(bundle)]) == OK
    lines = [line.split("  ") for line in capfd.readouterr().out.splitlines() if line.startswith("acceptance, ")]
    shown = "75 50 % by depth; lookup 25 50 50 75 100 %; {} tokens of heldout.jsonl, 2026-01-31"
    assert [(line[0], line[-1].strip()) for line in lines] == [
        ("acceptance, greedy", shown.format("1,234")),
        ("acceptance, temperature 0.7", shown.format("99")),
    ]
