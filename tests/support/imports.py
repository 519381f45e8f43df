"""Imports: which of the project's files a file needs, read from the sources without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.paths import ROOT, TESTS

_SOURCES = {
    **dict.fromkeys(("support", "attack", "cpus", "real_clients"), TESTS),
    **dict.fromkeys(("benchmarks", "deploy", "recipes"), ROOT),
    "spaceport": ROOT / "src",
}


@cache
def imported(file: Path, everywhere: bool = False) -> tuple[frozenset[str], frozenset[Path]]:
    """The packages and the project's files that a file imports when it is imported, or `everywhere`: when it runs."""
    modules = list(_modules(ast.parse(file.read_text("utf-8")), everywhere))
    packages = frozenset(module.partition(".")[0] for module in modules)
    return packages, frozenset(below for module in modules for below in _files_of(module))


@cache
def needed_files(file: Path, everywhere: bool = False) -> frozenset[Path]:
    """A file and all of the project's files that it imports, directly or through others."""
    seen, waiting = {file}, [file]
    while waiting:
        _, below = imported(waiting.pop(), everywhere)
        waiting += below - seen
        seen |= below
    return frozenset(seen)


def _modules(tree: ast.Module, everywhere: bool) -> Iterator[str]:
    """The modules that a file imports, and the names that it takes from them."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not everywhere:
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
