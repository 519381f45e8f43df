"""Commands that run a bundle take a checkpoint as well: it is exported once, and again when something has changed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter import export as exporting
from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import OK, bundle_cache, run
from spaceport.tools.cli.bundle_cache import CachedBundle, bundle_at, bundles_folder, cached_bundles
from support.paths import TINY

Capture = pytest.CaptureFixture[str]
PROGRAM = "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spaceport" / "bundles"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


class Exports:
    """Stands in for the export: writes a manifest, after what a test wants to happen in the meantime."""

    def __init__(self) -> None:
        self.count = 0
        self.meanwhile: Callable[[Path], None] = lambda folder: None

    def __call__(self, checkpoint: Path, target: Path, options: object, **others: Any) -> None:
        self.count += 1
        target.mkdir()
        (target / "model.onnx").write_bytes(b"graph")
        self.meanwhile(target)
        (target / MANIFEST_FILE).write_text("{}")


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    stand_in = Exports()
    monkeypatch.setattr(exporting, "export", stand_in)
    return stand_in


def rewrite(file: Path) -> None:
    """Change a byte of a file, but neither its size nor its modification time."""
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_bundle_is_opened_as_it_is(tiny_bundle: Path, cache: Path) -> None:
    assert bundle_at(tiny_bundle) == tiny_bundle
    assert not cache.exists()


@pytest.mark.parametrize("large", [bundle_cache._LARGE, 1], ids=["contents are read", "contents are remembered"])
def test_a_checkpoint_is_exported_once_and_again_when_one_of_its_files_changes(
    large: int, checkpoint: Path, cache: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(bundle_cache, "_LARGE", large)
    monkeypatch.setattr(bundle_cache, "_SETTLED", -1.0)
    first = bundle_at(checkpoint)
    assert f"note: {checkpoint} runs as the bundle {first}\n" in capfd.readouterr().err
    assert first.parent == cache == bundles_folder()
    assert first.name.startswith("model-")
    assert (bundle_at(checkpoint), exports.count) == (first, 1)
    bundles = {first}
    for change in (
        lambda: rewrite(checkpoint / "model.safetensors"),
        lambda: rewrite(checkpoint / "tokenizer.json"),
        lambda: (checkpoint / "chat_template.jinja").write_text("{{ messages }}"),
        lambda: (checkpoint / "additional_chat_templates").mkdir(),
        lambda: (checkpoint / "additional_chat_templates" / "rag.jinja").write_text("a"),
        lambda: monkeypatch.setattr(bundle_cache, "__version__", "9"),
    ):
        change()
        bundles.add(bundle_at(checkpoint))
    assert len(bundles) == exports.count == 6  # an empty folder changes nothing
    assert set(cached_bundles()) == bundles


def test_digests_of_large_files_are_remembered_only_once_these_have_settled(
    checkpoint: Path, cache: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_cache, "_LARGE", 1000)
    bundle_at(checkpoint)
    assert not (cache / "digests.json").exists()  # a change in the same tick of the clock would go unnoticed
    monkeypatch.setattr(bundle_cache, "_SETTLED", -1.0)
    bundle_at(checkpoint)
    weights = str(checkpoint / "model.safetensors")
    assert weights in (cache / "digests.json").read_text()
    read: list[str] = []
    record_of = bundle_cache.record_of
    monkeypatch.setattr(bundle_cache, "record_of", lambda stream: read.append(stream.name) or record_of(stream))
    bundle_at(checkpoint)
    assert read
    assert weights not in read
    (cache / "digests.json").write_text("no JSON")
    assert (bundle_at(checkpoint).parent, exports.count) == (cache, 1)


def test_a_bundle_with_options_is_another_one_for_other_options_or_another_adapter(
    checkpoint: Path, tmp_path: Path, exports: Exports
) -> None:
    adapter = shutil.copytree(TINY, tmp_path / "adapter")
    folder = tmp_path / "bundles"
    plain, quantized = exporting.ExportOptions(), exporting.ExportOptions(FORMATS["int8"], adapter=adapter)
    paths = [CachedBundle.of(checkpoint, folder, options).path for options in (None, plain, quantized)]
    rewrite(adapter / "model.safetensors")
    changed = CachedBundle.of(checkpoint, folder, quantized)
    assert len({*paths, changed.path}) == 4
    assert not changed.exists
    changed.export()
    assert changed.exists
    changed.export()  # as after another process
    assert (exports.count, [*folder.glob("*/")]) == (1, [changed.path])


def test_an_export_that_does_not_end_leaves_nothing(checkpoint: Path, cache: Path, exports: Exports) -> None:
    def fail(folder: Path) -> None:
        raise OSError("no space")

    endings = (
        (lambda folder: signal.raise_signal(signal.SIGTERM), KeyboardInterrupt, "^$"),
        (fail, OSError, "no space"),
        (lambda folder: rewrite(checkpoint / "model.safetensors"), InputFault, "was changed while it was exported"),
    )
    for ending, error, message in endings:
        exports.meanwhile = ending
        with pytest.raises(error, match=message):
            bundle_at(checkpoint)
        assert [file for file in cache.iterdir() if file.is_dir()] == []
    exports.meanwhile = lambda folder: None
    assert (bundle_at(checkpoint) / "model.onnx").read_bytes() == b"graph"


def test_a_killed_export_is_swept_by_the_next_one(checkpoint: Path, cache: Path, exports: Exports) -> None:
    exports.meanwhile = lambda folder: os._exit(7)
    child = os.fork()
    if child == 0:
        bundle_at(checkpoint)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len([file for file in cache.iterdir() if file.is_dir()]) == 1
    exports.meanwhile = lambda folder: None
    assert [file for file in cache.iterdir() if file.is_dir()] != [bundle_at(checkpoint)]
    assert [file for file in cache.iterdir() if file.is_dir()] == [bundle_at(checkpoint)]


def test_what_cannot_be_exported_is_refused_before_any_work(
    checkpoint: Path, tmp_path: Path, cache: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    expected = r"expected a bundle, a checkpoint folder \(config.json, weights, tokenizer\) or a GGUF file"
    for name, message in (
        ("nowhere", f"nowhere: no such file or folder: {expected}"),
        ("nowhere.gguf", f"nowhere.gguf: no such file or folder: {expected}"),
        ("file", f"file: is a file: {expected}"),
        ("empty", f"empty: no manifest.json and no config.json in it: {expected}"),
    ):
        with pytest.raises(InputFault, match=message):
            bundle_at(tmp_path / name)
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(InputFault, match=r"other users may write to it.*XDG_CACHE_HOME names another place"):
        bundle_at(checkpoint)
    cache.chmod(0o700)

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(bundle_cache, "version", missing)
    with pytest.raises(MissingDependency, match=r"needs the package torch, which is not installed: pip .*\[export\]"):
        bundle_at(checkpoint)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(bundle_cache, "version", lambda package: missing(package) if package == "gguf" else "1")
    with pytest.raises(MissingDependency, match=r"needs the package gguf, which is not installed: pip .*\[gguf\]"):
        bundle_at(tmp_path / "model.gguf")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputFault, match="no weights in it"):
        bundle_at(checkpoint)
    assert exports.count == 0


@pytest.mark.slow
def test_two_processes_generate_from_a_checkpoint_as_from_its_bundle(
    tiny_bundle: Path, checkpoint: Path, cache: Path, capfd: Capture
) -> None:
    command = [sys.executable, "-c", PROGRAM, "generate", str(checkpoint), "abc", "--max-tokens", "8"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert run(["generate", str(tiny_bundle), "abc", "--max-tokens", "8"]) == OK
    assert [text for text, _ in outputs] == [capfd.readouterr().out] * 2
    assert [process.returncode for process in processes] == [OK, OK]
    assert sum("writing the manifest" in errors for _, errors in outputs) == 1
    (bundle,) = cached_bundles()
    assert open_bundle(bundle).manifest.graph == open_bundle(tiny_bundle).manifest.graph
