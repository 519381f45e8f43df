"""Tiers: which tests need torch, so that the fast tier can leave them out without importing it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

HEAVY = {"torch", "transformers", "accelerate", "peft", "onnx"}  # all but onnx import torch
NO_TORCH = TESTS / "support" / "no_torch"

_SOURCES = {"support": TESTS, "spaceport": ROOT / "src"}  # top-level package -> the folder that holds it


def _modules(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports when it is imported itself, and the names that it takes from them."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue  # runs later
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


@cache
def _files_of(module: str) -> frozenset[Path]:
    """The project's files that importing a module runs: its packages and itself."""
    folder = _SOURCES.get(module.partition(".")[0])
    if folder is None:
        return frozenset()
    path = folder.joinpath(*module.split("."))
    own = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return _files_of(module.rpartition(".")[0]).union(own)


@cache
def _imports(file: Path) -> tuple[bool, set[Path]]:
    """Whether a file itself imports torch, and the project's files that it imports."""
    modules = list(_modules(ast.parse(file.read_text("utf-8"))))
    heavy = any(module.partition(".")[0] in HEAVY for module in modules)
    return heavy, {below for module in modules for below in _files_of(module)}


def imports_torch(file: Path) -> bool:
    """Whether importing a file imports torch, itself or through other files of the project."""
    seen, waiting = set[Path](), [file]
    while waiting:
        heavy, below = _imports(waiting.pop())
        if heavy:
            return True
        waiting += below - seen
        seen |= below
    return False


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
