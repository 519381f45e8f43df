"""Suite: what the fast tier leaves out, and what tests find from earlier runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cache import FOLDER, NOTES, built
from support.imports import needed_files
from support.paths import ROOT, TESTS
from support.tiers import imports_torch


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from transformers.cache_utils import Cache", True),
        ("class A:\n    import torch", True),
        ("from support import families", True),
        ("from recipes.train import train", True),  # through tools/tune/tuning.py
        ("def f():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from spaceport.runtime.decode.step import step", False),
    ],
)
def test_a_file_that_imports_torch_is_found_by_what_it_says(source: str, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(source)
    assert imports_torch(file) is expected


@pytest.mark.slow
def test_the_fast_tier_leaves_out_what_needs_torch_or_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text("utf-8"))
    (tmp_path / "test_heavy.py").write_text("import torch")
    (tmp_path / "test_light.py").write_text(
        "import sys, pytest\n"
        "def test_bundle(tiny_bundle): ...\n"
        "@pytest.mark.torch\ndef test_marked(): ...\n"
        "def test_forgotten(): import torch\n"
        "def test_light(): assert 'torch' not in sys.modules\n"
    )
    options = ["--fast", "-n0", "-rA", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 2 deselected" in done.stdout.splitlines()[-1], done.stdout
    assert "RuntimeError: the fast tier imports neither torch nor transformers" in done.stdout
    assert "test_heavy" not in done.stdout


def test_the_same_content_is_built_once_and_a_change_of_the_result_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(NOTES, str(tmp_path))
    source, builds = tmp_path / "source", list[str]()
    source.mkdir()

    def build(source_file: str = "graphs/contract/signature.py") -> Path:
        def make(folder: Path) -> None:
            folder.mkdir()
            (folder / "copy").write_text((source / "file").read_text())
            builds.append("build")

        return built("copy", (source, "an option"), [source_file], make)

    (source / "file").write_text("one")
    first = build()
    assert build() == first
    assert len(builds) == 1
    assert build("graphs/contract/manifest.py") != first  # other sources of the product
    (source / "file").write_text("two")
    assert (build() / "copy").read_text() == "two"
    assert (first / "copy").read_text() == "one"
    (first / "copy").write_text("changed")
    (source / "file").write_text("one")
    with pytest.raises(AssertionError, match="a test has changed it"):
        build()
    assert (build() / "copy").read_text() == "one"
    assert len(builds) == 4


def test_the_sources_of_a_bundle_are_all_files_that_run_when_it_is_made(tmp_path: Path) -> None:
    file, package = tmp_path / "late.py", ROOT / "src" / "spaceport"
    file.write_text("def f():\n    from spaceport.graphs.contract.signature import Signature")
    assert package / "graphs" / "contract" / "signature.py" in needed_files(file, everywhere=True)
    assert needed_files(file) == {file}
    needed = needed_files(package / "exporter" / "export.py", everywhere=True)
    assert {package / "exporter" / "to_onnx.py", package / "graphs" / "attention.py"} <= needed


@pytest.mark.slow
def test_a_file_that_passed_runs_again_when_what_it_reads_has_changed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text("utf-8"))
    read = tmp_path / "read.txt"
    read.write_text("1")
    (tmp_path / "test_read.py").write_text(
        f"import pathlib, pytest\npytestmark = pytest.mark.on_change({str(read)!r})\n"
        f"def test_one(): ...\ndef test_two(): assert int(pathlib.Path({str(read)!r}).read_text()) < 3\n"
    )

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), str(tmp_path), *options]
        environment = {**os.environ, FOLDER: str(tmp_path / "cache"), NOTES: str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert "2 passed" in run()
    assert "2 deselected" in run()
    assert "2 passed" in run("--unchanged")
    read.write_text("2")
    assert "1 passed" in run("-k", "one")  # a part of a file says nothing about the whole
    assert "2 passed" in run()
    read.write_text("3")
    assert "1 failed, 1 passed" in run()
    assert "1 failed, 1 passed" in run()
