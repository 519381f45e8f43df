"""Tiers: which tests need torch, and which run again only when what they test has changed since they passed."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from support.cache import cache_folder, digest_of, libraries
from support.paths import ROOT, TESTS

NO_TORCH, NO_ONNX = TESTS / "support" / "no_torch", TESTS / "support" / "no_onnx"


def needs_torch(item: pytest.Item) -> bool:
    """Whether a test needs torch for a bundle or has the marker; a file that imports torch is skipped."""
    names: list[object] = [*getattr(item, "fixturenames", [])]
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        names += item.callspec.params.values()  # for request.getfixturevalue
    bundles = [name for name in names if isinstance(name, str) and name.endswith("_bundle")]
    return bool(bundles) or item.get_closest_marker("torch") is not None


def forbid_torch() -> None:
    """Skip what imports torch or onnx in this process, and make imports of torch fail in child processes."""
    assert "torch" not in sys.modules, "the fast tier begins without torch"
    sys.path[:0] = [str(NO_TORCH), str(NO_ONNX)]
    paths = [str(NO_TORCH), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


# What all tests that are marked so depend on.
_ALWAYS = ("pyproject.toml", "constraints.txt", "tests/support", "graphs", "kernels", "runtime", "tools")


class OnChange:
    """Skips tests of files that have passed as they are, and records files that pass as a whole."""

    def __init__(self, items: list[pytest.Item], run_all: bool) -> None:
        self._records: dict[str, Path] = {}  # of each test file, which is there once it has passed
        self._waiting = Counter[str]()  # tests of each file that have not passed
        marked = defaultdict[Path, list[pytest.Item]](list)
        for item in items:
            if item.get_closest_marker("on_change"):
                marked[item.path].append(item)
        for file, tests in marked.items():
            name = tests[0].nodeid.partition("::")[0]
            self._records[name] = cache_folder() / "passed" / _digest(file, tests)
            if not self._records[name].exists() or run_all:
                self._waiting[name] = len(tests)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = item.nodeid.partition("::")[0]
        if name in self._records and name not in self._waiting:
            pytest.skip(f"{name} passed before and has not changed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0]
        if name in self._waiting and report.when == "teardown" and report.passed:
            self._waiting[name] -= 1
        if name in self._waiting and (report.failed or report.skipped):
            self._waiting[name] += 1  # never reaches 0
        if self._waiting.get(name) == 0:
            self._records[name].parent.mkdir(parents=True, exist_ok=True)
            self._records[name].touch()


def _digest(file: Path, tests: list[pytest.Item]) -> str:
    named = {path for test in tests for marker in test.iter_markers("on_change") for path in marker.args}
    paths = [file, *(ROOT / path for path in sorted({*_ALWAYS, *named}))]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise pytest.UsageError(f"{file}: on_change names {', '.join(missing)}: expected files or folders that exist")
    contents = [(os.path.relpath(path, ROOT), path) for path in paths]
    return digest_of((sorted(test.nodeid for test in tests), contents, libraries()))
