"""Backends: which one runs a bundle here, why the others do not, and which of its engines may run at all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, EngineRecord
from spaceport.graphs.contract.signature import Lowering
from spaceport.runtime import backends
from spaceport.runtime.backends import clashing, open_engine, require, resolve, why_not
from spaceport.runtime.backends.built_engines import (
    NamedEngine,
    built_here,
    engine_for,
    read_engine,
    record_built_engine,
)
from spaceport.runtime.backends.machine import Gpu
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import EngineOptions
from support.small_bundle import RECORD, fill

OPTIONS = EngineOptions(capacity=512, requests=2)
PLAN = b"an engine"
GPU = Gpu("NVIDIA Test", "sm89", 24 << 30)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """An append-lowered bundle with one engine for the GPU of these tests."""
    manifest = fill(tmp_path)
    (tmp_path / ENGINES_FOLDER).mkdir(exist_ok=True)
    found = Bundle(tmp_path, replace(manifest, signature=replace(manifest.signature, lowering="append"), engines={}))
    return with_engines(found, a={})


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user notes what was built here: nothing yet."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver reports a GPU."""
    monkeypatch.setattr(backends, "no_gpu", lambda: None)
    monkeypatch.setattr(backends, "gpu", lambda: GPU)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no driver, even if this one has one."""
    monkeypatch.setattr(backends, "no_gpu", lambda: "no NVIDIA driver here")


def with_engines(bundle: Bundle, **engines: dict[str, Any]) -> Bundle:
    """A bundle with engines that differ from the usual one in the record of each."""
    usual = replace(
        RECORD, graph=bundle.manifest.graph, sha256=hashlib.sha256(PLAN).hexdigest(), size=len(PLAN), version="1.7"
    )
    records: dict[str, EngineRecord] = {
        f"{name}.engine": replace(usual, **reported) for name, reported in engines.items()
    }
    for name in records:
        (bundle.path / ENGINES_FOLDER / name).write_bytes(PLAN)
    return Bundle(bundle.path, replace(bundle.manifest, engines=records))


def scattered(bundle: Bundle) -> Bundle:
    signature = replace(bundle.manifest.signature, lowering="scatter")
    return Bundle(bundle.path, replace(bundle.manifest, signature=signature, engines={}))


def chosen(bundle: Bundle, **options: Any) -> str:
    return engine_for(bundle, "tensorrt-rtx", "1.7", "sm89", replace(OPTIONS, **options)).name


def test_of_engines_with_enough_capacity_the_smallest_runs(bundle: Bundle) -> None:
    found = with_engines(
        bundle,
        a={"capacity": 4096, "requests": 4},
        b={"capacity": 512, "requests": 1},
        c={"capacity": 1024, "requests": 8},
        d={"capacity": 1024, "requests": 2},
        e={"target": "sm80"},
        f={"capacity": 512, "requests": 2, "version": "1.6"},
        g={"capacity": 512, "requests": 2, "graph": ("d" * 64,)},
        h={"capacity": 512, "requests": 2, "backend": "tensorrt"},
    )
    assert chosen(found) == "d.engine"
    assert chosen(found, requests=1) == "b.engine"
    assert chosen(found, requests=3) == "c.engine"
    assert chosen(found, capacity=1025) == "a.engine"
    any_version = engine_for(found, "tensorrt-rtx", None, "sm89", OPTIONS).name
    assert any_version == "f.engine", "before the version is known"


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({"backend": "tensorrt"}, "it holds no tensorrt-rtx engine: build one with `spaceport build .* --backend tens"),
        ({"graph": ("d" * 64,)}, "its tensorrt-rtx engines were built from another graph: build them again with"),
        ({"target": "sm80"}, "its tensorrt-rtx engines are for sm80, this GPU is sm89: .*--target current"),
        ({"version": "1.6"}, "its engines were built with tensorrt-rtx 1.6, 1.7 is installed: build one"),
        ({"requests": 1}, "its engines take 1 requests at most, max_requests is 2: lower it.*--max-requests 2"),
        ({"capacity": 256}, "its engines have 256 slots, 512 are needed: lower max_seq_len, or .*a higher --max-seq"),
    ],
)
def test_the_engine_that_comes_nearest_says_what_it_lacks(
    bundle: Bundle, reported: dict[str, Any], message: str
) -> None:
    # the other one lacks what is asked about first
    other = {"backend": "tensorrt"} if "backend" in reported else {"target": "sm75"} if "target" not in reported else {}
    engines = with_engines(bundle, near=reported, far={**reported, **other})
    with pytest.raises(InputFault, match=message):
        chosen(engines)


def test_an_engine_whose_file_was_removed_is_none(bundle: Bundle) -> None:
    both = with_engines(bundle, a={}, b={"capacity": 9999})
    assert chosen(both) == "a.engine"
    (both.path / ENGINES_FOLDER / "a.engine").unlink()
    assert chosen(both) == "b.engine"
    (both.path / ENGINES_FOLDER / "b.engine").unlink()
    with pytest.raises(InputFault, match="it holds no tensorrt-rtx engine: build one with"):
        chosen(both)


def test_an_engine_runs_if_it_was_built_here_or_is_trusted_for_once(bundle: Bundle, state: Path) -> None:
    engine = NamedEngine(*next(iter(bundle.manifest.engines.items())))
    record_built_engine("0" * 64)
    message = r"a\.engine: it was not built on this machine, .*set trust_engines=True if you trust"
    with pytest.raises(BundleError, match=message):
        read_engine(bundle, engine, trusted=False)
    assert read_engine(bundle, engine, trusted=True) == PLAN
    assert not built_here(engine.record.sha256)
    assert record_built_engine(engine.record.sha256)
    assert read_engine(bundle, engine, trusted=False) == PLAN
    assert record_built_engine(engine.record.sha256), "it is noted already"
    noted = (state / "spaceport" / "built-engines").read_text().split()
    assert noted == ["0" * 64, engine.record.sha256]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_changed_engine_never_runs(bundle: Bundle, state: Path, trusted: bool) -> None:
    engine = NamedEngine(*next(iter(bundle.manifest.engines.items())))
    record_built_engine(engine.record.sha256)
    record_built_engine(hashlib.sha256(bytes(len(PLAN))).hexdigest())
    file = bundle.path / ENGINES_FOLDER / engine.name
    file.write_bytes(bytes(len(PLAN)))
    with pytest.raises(BundleError, match=r"sha256 is .*, the manifest says .*: build it again"):
        read_engine(bundle, engine, trusted)
    file.unlink()
    with pytest.raises(BundleError, match="No such file or directory: build it again"):
        read_engine(bundle, engine, trusted)


def test_what_was_built_is_noted_in_the_users_state_if_that_is_possible(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "spaceport").write_text("a file where the folder would be")
    assert not record_built_engine("a" * 64)
    assert not built_here("a" * 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert record_built_engine("a" * 64)
    assert (tmp_path / ".local/state/spaceport/built-engines").read_text() == f"{'a' * 64}\n"


@pytest.mark.usefixtures("with_gpu")
def test_the_best_backend_is_the_first_that_runs_the_bundle(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "require_module", lambda backend: None)  # everything is installed
    both = with_engines(bundle, a={}, b={"backend": "tensorrt"})
    assert resolve(both, "auto", OPTIONS) == ("tensorrt", ())
    name, (note,) = resolve(bundle, "auto", OPTIONS)
    assert name == "tensorrt-rtx"
    assert note.startswith(f"not tensorrt: {bundle.path}: it holds no tensorrt engine")
    name, notes = resolve(scattered(bundle), "auto", OPTIONS)
    assert (name, len(notes)) == ("onnxruntime-cuda", 2)
    name, notes = resolve(with_engines(bundle, a={"target": "sm75"}), "auto", OPTIONS)
    assert name == "onnxruntime"
    assert [note.split(":")[0] for note in notes] == ["not tensorrt", "not tensorrt-rtx", "not onnxruntime-cuda"]
    assert "sm75, this GPU is sm89" in notes[1]


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_only_engines_are_missed(bundle: Bundle) -> None:
    assert resolve(scattered(bundle), "auto", OPTIONS) == ("onnxruntime", ())
    name, (note,) = resolve(bundle, "auto", OPTIONS)
    assert name == "onnxruntime"
    assert note == "not tensorrt, tensorrt-rtx, onnxruntime-cuda: needs an NVIDIA GPU: no NVIDIA driver here"


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("backend", "lowering", "name", "message"),
    [
        ("tensorrt", "scatter", "float16", "its graph is scatter-lowered, .*--lowering append, then `spaceport build`"),
        ("onnxruntime-cuda", "append", "float16", "its graph is append-lowered, .*--lowering scatter, or `spaceport b"),
        (
            "onnxruntime",
            "scatter",
            "bfloat16",
            "its format is bfloat16, .* expected one of tensorrt, .*--format float32$",
        ),
        ("onnxruntime-cuda", "scatter", "int8", "its format is int8, .* expected one of onnxruntime, or .* float16$"),
        ("tensorrt", "scatter", "int4", "its format is int4, .* expected one of onnxruntime, or .*--format float16$"),
    ],
)
def test_a_bundle_of_another_kind_is_a_bad_file(
    bundle: Bundle, backend: str, lowering: Lowering, name: str, message: str
) -> None:
    signature = replace(bundle.manifest.signature, lowering=lowering, dtype=FORMATS[name].dtype)
    manifest = replace(bundle.manifest, format=name, signature=signature)
    with pytest.raises(InputFault, match=message):
        require(Bundle(bundle.path, manifest), backend, OPTIONS)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx", "onnxruntime-cuda"])
def test_a_backend_that_needs_a_gpu_says_so_before_all_else(bundle: Bundle, backend: str) -> None:
    message = f"backend {backend} needs an NVIDIA GPU: no NVIDIA driver here"
    for kind in (bundle, scattered(bundle)):
        assert why_not(kind, backend, OPTIONS) == message
        with pytest.raises(MissingDependency, match=message):
            open_engine(kind, backend, OPTIONS)


@pytest.mark.usefixtures("with_gpu")
def test_two_packages_of_onnxruntime_are_a_mistake_where_cuda_is_asked_for(
    bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clashing() is None
    site, other = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("other")
    for package in ("onnxruntime", "onnxruntime_gpu"):  # what pip leaves behind of both
        metadata = site / f"{package}-1.31.1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(other)
    monkeypatch.syspath_prepend(site)
    message = (
        r"needs onnxruntime-gpu alone: .*both installed.*: pip uninstall onnxruntime onnxruntime-gpu, then pip install "
        r".*\[gpu\]'"
    )
    with pytest.raises(MissingDependency, match=message):
        require(scattered(bundle), "onnxruntime-cuda", OPTIONS)
    require(scattered(bundle), "onnxruntime", OPTIONS)  # on the CPU both of them runs
    name, notes = resolve(scattered(bundle), "auto", OPTIONS)
    assert name == "onnxruntime"
    assert any("both installed" in note for note in notes)
    metadata.parent.rename(other / metadata.parent.name)  # packages in two folders: the module of the first is imported
    assert clashing() is None


def test_a_backend_that_nobody_knows_is_a_mistake_of_usage(bundle: Bundle) -> None:
    message = "backend is 'cuda': expected auto, tensorrt, tensorrt-rtx, onnxruntime-cuda, onnxruntime"
    with pytest.raises(OptionFault, match=message):
        open_engine(bundle, "cuda", OPTIONS)
