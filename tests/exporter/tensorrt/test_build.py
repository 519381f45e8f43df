"""Build: an engine is stored completely, named by everything it depends on, or the bundle stays unchanged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from spaceport.exporter.tensorrt import to_tensorrt
from spaceport.exporter.tensorrt.append_graph import UnbuildableGraph, append_graph
from spaceport.exporter.tensorrt.build import build_engine
from spaceport.exporter.tensorrt.engines import ChangedBundle, engine_name, store_engine
from spaceport.exporter.tensorrt.profiles import Shapes
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, build, open_library
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, MANIFEST_FILE, SCHEMA
from spaceport.runtime.backends import trust
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import FAULT, OK
from support.append_bundle import Attending
from support.small_bundle import edit

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

PROGRAM = "from spaceport.tools.cli import main; main()"
RECIPE = BuildOptions("sm89", Shapes(1024, 4, 64, 512))

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record trusted engines in a folder of the test instead of the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    Attending().write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library("tensorrt-rtx")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and folder of a bundle."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_an_engine_is_stored_in_the_bundle_with_its_record(bundle: Path, capfd: Capture) -> None:
    before = contents(bundle)
    options = ["--max-requests", "3", "--max-seq-len", "300", "--max-step-rows", "36", "--prefill-rows", "256"]
    assert run(["build", str(bundle), "--target", "sm89", *options]) == OK
    manifest = open_bundle(bundle).manifest
    ((name, record),) = manifest.engines.items()
    plan = (bundle / ENGINES_FOLDER / name).read_bytes()
    assert (record.sha256, record.size) == (hashlib.sha256(plan).hexdigest(), len(plan))
    assert record.graph == (manifest.files["model.onnx"].sha256, manifest.files["model.onnx.data"].sha256)
    assert (record.backend, record.target) == ("tensorrt-rtx", "sm89")
    assert record.version == open_library().version
    assert (record.capacity, record.requests, record.step_rows, record.prefill_rows) == (960, 3, 36, 256)
    assert (record.refittable, record.decomposed) == (False, 0)
    assert trust.built_here(record.sha256)
    after = contents(bundle)
    assert set(after) - set(before) == {ENGINES_FOLDER, f"{ENGINES_FOLDER}/{name}"}
    assert all(after[file] == content for file, content in before.items() if file != MANIFEST_FILE)
    output, errors = capfd.readouterr()
    assert output.startswith(f"{bundle}/engines/{name}: tensorrt-rtx {record.version}, ")
    assert "of activation memory" in output
    first, *rest = errors.splitlines()
    assert first.startswith(f"building with tensorrt-rtx {record.version} for sm89: ")
    assert re.search(
        "KB of KV cache for 3 requests of 960 slots, up to .* KB of logits; the build takes about 34.* MB of host memory",
        first,
    )
    assert rest
    assert all("%" in line for line in rest), "no messages of the library itself"


def test_an_existing_engine_with_the_same_options_is_reused(
    bundle: Path, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["build", str(bundle), "--target", "sm89,sm89"]) == OK
    once = contents(bundle)
    (once_named,) = open_bundle(bundle).manifest.engines
    capfd.readouterr()
    assert run(["build", str(bundle), "--target", "sm89"]) == OK
    output, errors = capfd.readouterr()
    assert output.endswith(", exists already\n")
    assert errors == ""
    assert contents(bundle) == once
    assert run(["build", str(bundle), "--target", "sm89", "--rebuild"]) == OK
    assert "building with" in capfd.readouterr().err
    assert run(["build", str(bundle), "--target", "sm89", "--max-requests", "2"]) == OK
    assert "building with" in capfd.readouterr().err
    assert run(["build", str(bundle), "--target", "sm89", "--json"]) == OK
    (entry,) = json.loads(capfd.readouterr().out)["engines"]
    assert (entry["built"], entry["name"], entry["activation"]) == (False, once_named, None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine's"))
    assert run(["build", str(bundle), "--target", "sm89"]) == OK
    stderr = capfd.readouterr().err
    assert "building with" in stderr, "an engine that was built elsewhere is not trusted here"
    assert "the existing engine was not built on this machine: building it again" in stderr
    assert sorted(record.requests for record in open_bundle(bundle).manifest.engines.values()) == [2, 4]


def test_a_damaged_or_untrusted_engine_is_built_again(bundle: Path, library: Library) -> None:
    manifest = open_bundle(bundle).manifest
    first = build_engine(bundle, manifest, library, RECIPE)
    manifest = open_bundle(bundle).manifest
    assert first.built
    assert not build_engine(bundle, manifest, library, RECIPE).built
    assert build_engine(bundle, manifest, library, RECIPE, reusable=lambda record: False).built
    file = bundle / ENGINES_FOLDER / first.name
    file.write_bytes(bytes(first.record.size))
    assert build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE).built
    file.unlink()
    assert build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE).built


def test_the_name_of_an_engine_depends_on_all_build_options(library: Library) -> None:
    graph, newer = ("a" * 64, "b" * 64), to_tensorrt.Library("tensorrt-rtx", type("", (), {"__version__": "1.8"}))
    shapes = RECIPE.shapes
    names = [
        engine_name(graph, 50, library, RECIPE),
        engine_name(("a" * 64, "c" * 64), 50, library, RECIPE),
        engine_name(graph, 50, newer, RECIPE),
        engine_name(graph, 50, replace(library, flavour="tensorrt"), RECIPE),
        engine_name(graph, 50, library, replace(RECIPE, target="sm80")),
        *(
            engine_name(graph, 50, library, replace(RECIPE, shapes=replace(shapes, **{part: value})))
            for part, value in (("capacity", 1088), ("requests", 5), ("step_rows", 65), ("prompt_rows", 513))
        ),
        engine_name(graph, 50, library, replace(RECIPE, workspace=1 << 30)),
        engine_name(graph, 50, library, replace(RECIPE, refittable=True)),
        engine_name(graph, 50, library, replace(RECIPE, mask_slots=3)),
    ]
    assert len(set(names)) == len(names)
    assert engine_name(graph, 50, library, RECIPE) == names[0]
    assert names[0].startswith("sm89-")


def test_engines_of_an_earlier_graph_are_removed(bundle: Path, library: Library) -> None:
    stale = build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE).name
    other = build_engine(bundle, open_bundle(bundle).manifest, library, replace(RECIPE, target="sm80")).name
    edit(bundle, lambda manifest: manifest["engines"][stale].update(graph=["d" * 64]))
    (bundle / ENGINES_FOLDER / "sm75-0.engine.partial").write_bytes(b"of a killed build")
    new = build_engine(bundle, open_bundle(bundle).manifest, library, replace(RECIPE, target="sm86")).name
    assert set(open_bundle(bundle).manifest.engines) == {other, new}
    assert {file.name for file in (bundle / ENGINES_FOLDER).iterdir()} == {other, new}


def test_an_engine_of_the_old_graph_is_not_stored_after_a_new_export(
    bundle: Path, library: Library, tmp_path: Path
) -> None:
    manifest = open_bundle(bundle).manifest
    record = build_engine(bundle, manifest, library, RECIPE).record
    shutil.rmtree(bundle)
    Attending().write(bundle, seed=6)
    before = contents(bundle)
    with pytest.raises(ChangedBundle, match="its graph was replaced while the engine was built: build it again"):
        store_engine(bundle, "sm89-0.engine", memoryview(b"plan"), record)
    assert contents(bundle) == before


def test_storing_an_engine_upgrades_a_manifest_of_the_first_schema(bundle: Path, library: Library) -> None:
    def as_first(manifest: dict[str, Any]) -> None:
        manifest["schema"] = 1
        del manifest["engines"], manifest["weights"], manifest["activations"], manifest["embeddings"]

    edit(bundle, as_first)
    name = build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE).name
    manifest = open_bundle(bundle).manifest
    assert manifest.schema == SCHEMA
    assert list(manifest.engines) == [name]


def test_two_concurrent_builds_are_both_in_the_manifest(bundle: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "build", str(bundle), "--target"]
    processes = [
        subprocess.Popen([*command, target], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for target in ("sm80", "sm89")
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == OK, errors
    assert {record.target for record in open_bundle(bundle).manifest.engines.values()} == {"sm80", "sm89"}


def test_storing_an_engine_waits_for_the_lock_on_the_bundle(bundle: Path, library: Library) -> None:
    record = build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE).record
    folder = os.open(bundle, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    before = contents(bundle)
    waiting = threading.Thread(target=store_engine, args=(bundle, "sm80-0.engine", memoryview(b"plan"), record))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert contents(bundle) == before
    os.close(folder)
    waiting.join()
    assert "sm80-0.engine" in open_bundle(bundle).manifest.engines


# argv: the maximum file size in bytes, arguments. Runs the program as on a full disk.
ON_A_FULL_DISK = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
{PROGRAM}
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_the_bundle_unchanged(bundle: Path, library: Library, there: bool) -> None:
    if there:
        build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE)
    before = contents(bundle)
    command = [sys.executable, "-c", ON_A_FULL_DISK, "1000000", "build", str(bundle), "--target", "sm80"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == FAULT
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "File too large while" in last
    assert last.endswith("MB were written: free some space and build again")
    assert contents(bundle) == before
    open_bundle(bundle)


def test_an_interrupt_ends_a_build_and_leaves_the_bundle_unchanged(bundle: Path, library: Library) -> None:
    before, reported = contents(bundle), []

    def interrupt(done: float, phase: str) -> None:
        reported.append(done)
        if len(reported) == 20:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE, on_progress=interrupt)
    assert len(reported) < 50, "the builder stopped when it was cancelled"
    assert reported == sorted(reported)
    assert contents(bundle) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_progress_callback_ends_the_build(bundle: Path, library: Library) -> None:
    def fail(done: float, phase: str) -> None:
        raise BrokenPipeError("the reader went away")

    before = contents(bundle)
    with pytest.raises(BrokenPipeError, match="the reader went away"):
        build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE, on_progress=fail)
    assert contents(bundle) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_bundle_is_refused_before_the_build(bundle: Path, library: Library) -> None:
    manifest = open_bundle(bundle).manifest
    bundle.chmod(0o500)
    started: list[str] = []
    with pytest.raises(InputFault, match="no permission to write in it: copy the bundle to a folder that is writable"):
        build_engine(bundle, manifest, library, RECIPE, on_start=lambda: started.append("build"))
    assert started == []


def test_a_buffer_that_tensorrt_would_copy_is_refused(bundle: Path, library: Library) -> None:
    """The network that the library builds counts, not the graph."""
    signature = Attending().signature
    model = append_graph(bundle, signature, 1024)
    (writer,) = [node for node in model.graph.node if node.output[0] == "present.0.key"]
    writer.output[0] = "written"
    model.graph.node.append(helper.make_node("Identity", ["written"], ["present.0.key"]))
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = "written" if name == "present.0.key" else name
    with pytest.raises(UnbuildableGraph, match=r"does not write present.0.key to the memory of past_key_values.0.key"):
        build(library, model, bundle, signature, RECIPE)
