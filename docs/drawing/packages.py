"""`python docs/drawing/packages.py` draws the packages and their imports in docs/architecture.md, from the sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("tools", "serving", "training", "verify", "exporter", "runtime", "graphs", "kernels")  # the highest first
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->\n"


def imports_of(package: str) -> set[str]:
    """The other packages that the modules of one import."""
    trees = (ast.parse(file.read_text("utf-8")) for file in sorted((ROOT / package).rglob("*.py")))
    return {name for tree in trees for name in _named(tree) if name in PACKAGES and name != package}


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("spaceport."):
            yield node.module.split(".")[1]


def drawing() -> str:
    """A flow chart without arrows that others imply."""
    imports = {package: imports_of(package) for package in PACKAGES}
    reached: dict[str, set[str]] = {}
    for package in reversed(PACKAGES):  # those that it imports come first
        reached[package] = set().union(*(reached[name] | {name} for name in imports[package] if name in reached))
    arrows = [
        f"    {package} --> {name}"
        for package in PACKAGES
        for name in PACKAGES
        if name in imports[package]
        and not any(name in reached[other] for other in imports[package] if other in reached)
    ]
    return "\n".join([BEGIN + "```mermaid", "flowchart TD", *arrows, "```", END])


def updated(page: str) -> str:
    """The page with the drawing as it is now."""
    before, rest = page.split(BEGIN)
    return before + drawing() + rest.split(END)[1]


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(updated(text), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'changed' if updated(text) != text else 'as it was'}", file=sys.stderr)
