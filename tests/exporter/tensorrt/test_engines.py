"""Engines: what storing an engine replaces, what it does not touch, and locking."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.exporter.atomic_folder import writing
from spaceport.exporter.tensorrt.engines import store_engine
from spaceport.graphs.contract.atomic_file import partial_of
from spaceport.graphs.contract.manifest import ENGINES_FOLDER
from spaceport.runtime.backends import trust
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli.inspect import verdict
from support.small_bundle import ENGINE, RECORD, fill


def test_only_engine_files_are_removed_when_an_engine_is_stored(tmp_path: Path) -> None:
    """A timing cache, notes or a folder beside them belong to the user."""
    record, engines = replace(RECORD, graph=fill(tmp_path).graph), tmp_path / ENGINES_FOLDER
    (engines / "older").mkdir(parents=True)
    own = [engines / "timing.cache", engines / "older" / "notes.txt"]
    others = [engines / "sm80-0.engine", engines / f"{ENGINE}.partial", partial_of(engines / "sm80-1.engine")]
    for file in (*own, *others):
        file.write_text("content")
    store_engine(tmp_path, ENGINE, memoryview(b"an engine"), record)
    assert all(file.read_text() == "content" for file in own)
    assert not any(file.exists() for file in others)
    assert (engines / ENGINE).read_bytes() == b"an engine"
    assert open_bundle(tmp_path).manifest.engines == {ENGINE: record}


def test_an_engine_replaces_one_that_a_runtime_could_not_distinguish(tmp_path: Path) -> None:
    """For example one with another workspace, or from an earlier version of this program."""
    record = replace(RECORD, graph=fill(tmp_path).graph)
    others = {
        "sm80-0.engine": replace(record, target="sm80"),
        "sm89-1.engine": replace(record, capacity=2048),
        "sm89-2.engine": replace(record, version="1.8"),
        "sm89-3.engine": replace(record, refittable=True),
    }
    for name, other in others.items():
        store_engine(tmp_path, name, memoryview(b"another engine"), other)
    store_engine(
        tmp_path, "sm89-4.engine", memoryview(b"an engine"), replace(record, sha256="e" * 64, size=14, decomposed=1)
    )
    store_engine(tmp_path, ENGINE, memoryview(b"an engine"), record)
    assert read_manifest(tmp_path).engines == {**others, ENGINE: record}
    assert {file.name for file in (tmp_path / ENGINES_FOLDER).iterdir()} == {*others, ENGINE}


def test_a_user_without_a_home_folder_cannot_record_trusted_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in a container with a user id that has no name."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert not trust.remember("a" * 64)
    assert not trust.built_here("a" * 64)
    assert not trust.state_folder().exists()


def test_engines_that_a_check_did_not_compare_are_reported(tmp_path: Path) -> None:
    """The report of `check` may be older than the engines, or from a machine that could not run them."""
    plain, passed = replace(fill(tmp_path), engines={}), {"passed": True, "backends": ["onnxruntime"]}
    built = replace(plain, engines={ENGINE: RECORD})
    assert verdict(plain, passed) == "passed"
    assert verdict(built, passed) == "passed; tensorrt-rtx engines were not compared"
    assert verdict(built, {"passed": True, "backends": ["tensorrt-rtx"]}) == "passed"
    assert verdict(built, {**passed, "passed": False}) == "FAILED"


def test_an_export_waits_while_an_engine_is_being_stored(tmp_path: Path) -> None:
    """Otherwise the manifest with the old bundle's engines would replace the new bundle's."""

    def export_again() -> None:
        with writing(tmp_path / "bundle", overwrite=True) as partial:
            fill(partial, b"another graph")

    bundle = tmp_path / "bundle"
    bundle.mkdir()
    before, stored = fill(bundle).graph, os.open(bundle, os.O_RDONLY)
    fcntl.flock(stored, fcntl.LOCK_EX)
    exporting = threading.Thread(target=export_again)
    exporting.start()
    exporting.join(0.3)
    assert exporting.is_alive()
    assert read_manifest(bundle).graph == before
    os.close(stored)
    exporting.join()
    assert open_bundle(bundle).manifest.graph != before


def test_a_bundle_opens_while_an_engine_is_being_stored(tmp_path: Path) -> None:
    """A file that disappears while the bundle is opened is not an error."""

    def come_and_go() -> None:
        while not finished.is_set():
            partial.write_bytes(b"an engine")
            partial.unlink()

    fill(tmp_path)
    (tmp_path / ENGINES_FOLDER).mkdir()
    partial, finished = tmp_path / ENGINES_FOLDER / f"{ENGINE}.partial", threading.Event()
    storing, interval = threading.Thread(target=come_and_go), sys.getswitchinterval()
    storing.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            open_bundle(tmp_path)
    finally:
        sys.setswitchinterval(interval)
        finished.set()
        storing.join()
