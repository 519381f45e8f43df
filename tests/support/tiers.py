"""Tiers: which tests need torch, and which run again only when what they test has changed since they passed."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from support.cache import cache_folder, digest_of, imported, libraries, needed_files, note
from support.paths import ROOT, TESTS

HEAVY = {"torch", "transformers", "accelerate", "peft", "onnx"}  # all but onnx import torch
NO_TORCH = TESTS / "support" / "no_torch"


def imports_torch(file: Path) -> bool:
    """Whether importing a file imports torch, itself or through other files of the project."""
    return any(imported(needed)[0] & HEAVY for needed in needed_files(file))


def needs_torch(item: pytest.Item) -> bool:
    """Whether a test in a file without torch needs torch for a bundle or has the marker."""
    names: list[object] = [*getattr(item, "fixturenames", [])]
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        names += item.callspec.params.values()  # for request.getfixturevalue
    bundles = [name for name in names if isinstance(name, str) and name.endswith("_bundle")]
    return bool(bundles) or item.get_closest_marker("torch") is not None


def forbid_torch() -> None:
    """Make imports of torch fail, in this process and in its child processes."""
    loaded = HEAVY & set(sys.modules)
    assert not loaded, f"the fast tier begins without torch, got {loaded}"
    sys.path.insert(0, str(NO_TORCH))
    paths = [str(NO_TORCH), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


_SETUP = ("pyproject.toml", "constraints.txt", "tests/conftest.py")


class OnChange:
    """Leaves out files that have passed as they are, and records those that pass as a whole."""

    def __init__(self, run_all: bool) -> None:
        self._run_all = run_all
        self._digests: dict[str, str] = {}  # test file -> what it has to pass with
        self._waiting = Counter[str]()  # tests of each file that have not passed

    def left_out(self, items: list[pytest.Item]) -> list[pytest.Item]:
        marked = defaultdict[Path, list[pytest.Item]](list)
        for item in items:
            if item.get_closest_marker("on_change"):
                marked[item.path].append(item)
        found = list[pytest.Item]()
        for file, tests in marked.items():
            name = tests[0].nodeid.partition("::")[0]
            self._digests[name] = _digest(file, tests)
            if self._record(name).exists() and not self._run_all:
                found += tests
                note(unchanged=name)
            else:
                self._waiting[name] = len(tests)
        return found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0]
        if name in self._waiting and report.when == "teardown" and report.passed:
            self._waiting[name] -= 1
        if name in self._waiting and (report.failed or report.skipped):
            self._waiting[name] += 1  # never reaches 0
        if self._waiting.get(name) == 0:
            self._record(name).parent.mkdir(parents=True, exist_ok=True)
            self._record(name).touch()

    def _record(self, name: str) -> Path:
        return cache_folder() / "passed" / self._digests[name]


def _digest(file: Path, tests: list[pytest.Item]) -> str:
    read = {path for test in tests for marker in test.iter_markers("on_change") for path in marker.args}
    files = sorted({*needed_files(file, everywhere=True), *(ROOT / path for path in (*_SETUP, *read))})
    if missing := [str(path) for path in files if not path.exists()]:
        raise pytest.UsageError(f"{file}: on_change names {', '.join(missing)}: expected files or folders that exist")
    contents = [(os.path.relpath(file, ROOT), file) for file in files]
    return digest_of((sorted(test.nodeid for test in tests), contents, libraries()))
