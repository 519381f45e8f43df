"""Import graph: the packages of the sources and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("graphs", "exporter", "runtime", "serving", "tools")
OWN_BOXES = "runtime"  # each of its modules that is in no sub-package has a box of its own

Graph = Mapping[str, frozenset[str]]  # box -> boxes that it imports


def modules() -> dict[str, Path]:
    """The modules of the package by their dotted names below `spaceport`."""
    found = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def box_of(module: str, path: Path) -> str:
    """The box that a module is drawn in: its package, at most two levels deep."""
    parts = module.split(".")
    if path.name != "__init__.py" and not (len(parts) == 2 and parts[0] == OWN_BOXES):
        parts.pop()
    return ".".join(parts[:2])


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("spaceport.") in known else str(node.module) for name in full]
        yield from (name for name in (name.removeprefix("spaceport.") for name in names) if name in known)


def imports_between_boxes() -> Graph:
    """What each box imports; boxes without any imports are left out."""
    known = modules()
    boxes = {module: box_of(module, path) for module, path in known.items()}
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        for target in imported(path, known):
            if boxes[target] != boxes[module]:
                found.setdefault(boxes[module], set()).add(boxes[target])
                found.setdefault(boxes[target], set())
    return {box: frozenset(found[box]) for box in sorted(found)}


def reach(graph: Graph) -> Graph:
    """All that each box imports, directly or through others."""
    found = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            box = waiting.pop()
            if box not in seen:
                seen.add(box)
                waiting.extend(graph[box])
        found[start] = frozenset(seen)
    return found


def groups_of(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The boxes, those that import each other together."""
    reached = reach(graph)
    return tuple(
        dict.fromkeys(
            tuple(other for other in graph if other == box or (other in reached[box] and box in reached[other]))
            for box in graph
        )
    )


def arrows_of(graph: Graph, groups: Sequence[tuple[str, ...]]) -> list[tuple[str, str]]:
    """The arrows between groups, named by their first boxes; one that follows from others is left out."""
    first = {box: group[0] for group in groups for box in group}
    reached = {group[0]: {first[box] for box in reach(graph)[group[0]]} - {group[0]} for group in groups}
    direct = {group[0]: {first[box] for member in group for box in graph[member]} - {group[0]} for group in groups}
    return [
        (above, below)
        for above in direct
        for below in sorted(direct[above])
        if not any(below in reached[between] for between in direct[above] - {below})
    ]
