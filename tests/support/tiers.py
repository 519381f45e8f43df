"""Tiers: which tests need torch, so that the fast tier can leave them out without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.imports import imported, needed_files
from support.paths import TESTS

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
