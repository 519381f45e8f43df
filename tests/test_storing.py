"""Storing: what an engine's way into a bundle leaves alone, and where nothing can be noted of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_bundle import ENGINE, RECORD, fill

from spaceport.exporter.engines import store
from spaceport.graphs.manifest import ENGINES_FOLDER
from spaceport.runtime.backends import trust
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli.inspect import verdict


def test_only_engines_make_room_for_an_engine(tmp_path: Path) -> None:
    """A timing cache, notes or a folder beside them are somebody's own."""
    record, engines = replace(RECORD, graph=fill(tmp_path).graph), tmp_path / ENGINES_FOLDER
    (engines / "older").mkdir(parents=True)
    own = [engines / "timing.cache", engines / "older" / "notes.txt"]
    others = [engines / "sm80-0.engine", engines / f"{ENGINE}.partial"]
    for file in (*own, *others):
        file.write_text("content")
    store(tmp_path, ENGINE, memoryview(b"an engine"), record)
    assert all(file.read_text() == "content" for file in own)
    assert not any(file.exists() for file in others)
    assert (engines / ENGINE).read_bytes() == b"an engine"
    assert open_bundle(tmp_path).manifest.engines == {ENGINE: record}


def test_a_user_without_a_home_can_note_nothing_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number which the machine has no name for."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert not trust.remember("a" * 64)
    assert not trust.built_here("a" * 64)
    assert not trust.state_folder().exists()


def test_engines_that_a_check_did_not_compare_are_told_of(tmp_path: Path) -> None:
    """Its report may be older than they are, or of a machine that could not run them."""
    plain, passed = replace(fill(tmp_path), engines={}), {"passed": True, "backends": ["onnxruntime"]}
    built = replace(plain, engines={ENGINE: RECORD})
    assert verdict(plain, passed) == "passed"
    assert verdict(built, passed) == "passed, but for tensorrt-rtx engines, which were not compared"
    assert verdict(built, {"passed": True, "backends": ["tensorrt-rtx"]}) == "passed"
    assert verdict(built, {**passed, "passed": False}) == "FAILED"
