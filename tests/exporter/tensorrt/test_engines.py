"""Engines: storing one replaces what it should and nothing else, under a lock, or the bundle stays as it was."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spaceport.exporter.atomic_folder import writing
from spaceport.exporter.tensorrt.engines import engine_name, store_engine
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, Shapes
from spaceport.graphs.contract.atomic_file import partial_of
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, EngineRecord
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli.inspect import verdict
from support.small_bundle import ENGINE, RECORD, edit, fill, new_bundle

PLAN = memoryview(b"an engine")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


@pytest.fixture
def record(bundle: Path) -> EngineRecord:
    return replace(RECORD, graph=read_manifest(bundle).graph)


def test_the_name_of_an_engine_depends_on_all_build_options() -> None:
    graph, library = ("a" * 64, "b" * 64), Library("tensorrt-rtx", SimpleNamespace(__version__="1.7"))
    options = BuildOptions("sm89", Shapes(1024, 4, 64, 512))
    shapes: list[dict[str, int]] = [{"capacity": 1088}, {"requests": 5}, {"step_rows": 65}, {"prompt_rows": 513}]
    others: list[dict[str, Any]] = [{"target": "sm80"}, {"workspace": 1 << 30}, {"mask_slots": 3}]
    others += [{"shapes": replace(options.shapes, **shape)} for shape in shapes]
    names = [
        engine_name(graph, 50, library, options),
        engine_name(("a" * 64, "c" * 64), 50, library, options),
        engine_name(graph, 50, Library("tensorrt-rtx", SimpleNamespace(__version__="1.8")), options),
        engine_name(graph, 50, replace(library, flavour="tensorrt"), options),
        *(engine_name(graph, 50, library, replace(options, **other)) for other in others),
    ]
    assert len(set(names)) == len(names)
    assert engine_name(graph, 50, library, options) == names[0]
    assert names[0].startswith("sm89-")


def test_only_engine_files_are_removed_when_an_engine_is_stored(bundle: Path, record: EngineRecord) -> None:
    """A timing cache, notes or a folder beside them belong to the user."""
    engines = bundle / ENGINES_FOLDER
    (engines / "older").mkdir(parents=True)
    own = [engines / "timing.cache", engines / "older" / "notes.txt"]
    others = [engines / "sm80-0.engine", partial_of(engines / "sm80-1.engine")]
    for file in (*own, *others):
        file.write_text("content")
    store_engine(bundle, ENGINE, PLAN, record)
    assert all(file.read_text() == "content" for file in own)
    assert not any(file.exists() for file in others)
    assert (engines / ENGINE).read_bytes() == PLAN
    assert open_bundle(bundle).manifest.engines == {ENGINE: record}


def test_an_engine_replaces_those_of_earlier_graphs_and_one_that_a_runtime_could_not_distinguish(
    bundle: Path, record: EngineRecord
) -> None:
    """For example one with another workspace, or from an earlier version of this program."""
    others = {
        "sm80-0.engine": replace(record, target="sm80"),
        "sm89-1.engine": replace(record, capacity=2048),
        "sm89-2.engine": replace(record, version="1.8"),
        "sm89-3.engine": replace(record, step_rows=1),
    }
    same = replace(record, sha256="e" * 64, size=14, decomposed=1)
    stale = replace(record, target="sm75")
    for name, other in {**others, "sm89-4.engine": same, "sm75-5.engine": stale}.items():
        store_engine(bundle, name, PLAN, other)
    edit(bundle, lambda manifest: manifest["engines"]["sm75-5.engine"].update(graph=["d" * 64]))
    store_engine(bundle, ENGINE, PLAN, record)
    assert read_manifest(bundle).engines == {**others, ENGINE: record}
    assert {file.name for file in (bundle / ENGINES_FOLDER).iterdir()} == {*others, ENGINE}


def test_an_engine_of_the_old_graph_is_not_stored_after_a_new_export(bundle: Path, record: EngineRecord) -> None:
    shutil.rmtree(bundle)
    bundle.mkdir()
    manifest = fill(bundle, b"another graph")
    with pytest.raises(InputFault, match="its graph was replaced while the engine was built: build it again"):
        store_engine(bundle, ENGINE, PLAN, record)
    assert read_manifest(bundle) == manifest
    assert not (bundle / ENGINES_FOLDER).exists()


@pytest.mark.parametrize("what", ["storing", "exporting"])
def test_storing_an_engine_and_exporting_again_wait_for_each_other(
    bundle: Path, record: EngineRecord, what: str
) -> None:
    """Otherwise the manifest with the old bundle's engines would replace the new bundle's."""

    def export_again() -> None:
        with writing(bundle, overwrite=True) as partial:
            fill(partial, b"another graph")

    work = partial(store_engine, bundle, "sm80-0.engine", PLAN, record) if what == "storing" else export_again
    before, lock = read_manifest(bundle), os.open(bundle, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = threading.Thread(target=work)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert read_manifest(bundle) == before
    os.close(lock)
    waiting.join()
    manifest = open_bundle(bundle).manifest
    assert ("sm80-0.engine" in manifest.engines) == (what == "storing")
    assert (manifest.graph == before.graph) == (what == "storing")


def test_a_bundle_opens_while_an_engine_is_being_stored(bundle: Path) -> None:
    """A file that disappears while the bundle is opened is not an error."""

    def come_and_go() -> None:
        while not finished.is_set():
            partial.write_bytes(PLAN)
            partial.unlink()

    (bundle / ENGINES_FOLDER).mkdir()
    partial, finished = bundle / ENGINES_FOLDER / f"{ENGINE}.partial", threading.Event()
    storing, interval = threading.Thread(target=come_and_go), sys.getswitchinterval()
    storing.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            open_bundle(bundle)
    finally:
        sys.setswitchinterval(interval)
        finished.set()
        storing.join()


def test_engines_that_a_check_did_not_compare_are_reported(bundle: Path, record: EngineRecord) -> None:
    """The report of `check` may be older than the engines, or from a machine that could not run them."""
    plain, passed = replace(read_manifest(bundle), engines={}), {"passed": True, "backends": ["onnxruntime"]}
    built = replace(plain, engines={ENGINE: record})
    assert verdict(plain, passed) == "passed"
    assert verdict(built, passed) == "passed; tensorrt-rtx engines were not compared"
    assert verdict(built, {"passed": True, "backends": ["tensorrt-rtx"]}) == "passed"
    assert verdict(built, {**passed, "passed": False}) == "FAILED"
