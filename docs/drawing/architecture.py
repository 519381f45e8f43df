"""Architecture drawing: docs/architecture.svg, the packages and their imports, generated from the sources.

Run `python docs/drawing/architecture.py` after a change of imports between packages; a test compares the picture with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


BANDS = (("tools",), ("serving",), ("exporter", "runtime"), ("graphs",))  # top to bottom; side by side in the third

WIDTH, MARGIN, GUTTER = 1000, 24, 40  # pixels; the gutter between the parts of a band
BOX, GAP, INSIDE = (30, 26, 10)  # height of a box, space between boxes, space around boxes that share a frame
CHARACTER = 7.7  # width of a character at 13 pixels, generously
SWEEPS = 24  # passes over the rows, down and up in turn


@dataclass
class Item:
    """One position in a row: a box, several that import each other, or none where an arrow passes through."""

    row: int
    boxes: tuple[str, ...] = ()
    part: str = ""
    x: float = 0.0  # middle
    above: list[Item] = field(default_factory=list)
    below: list[Item] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.boxes[0] if self.boxes else ""

    @property
    def width(self) -> float:
        inner = sum(map(width_of, self.boxes)) + GAP / 2 * max(0, len(self.boxes) - 1)
        return inner + (2 * INSIDE if len(self.boxes) > 1 else 0)


def width_of(box: str) -> float:
    return len(box) * CHARACTER + 20


def rows_of(groups: Sequence[tuple[str, ...]], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The row of each group, from the top: below all that import it, as low as that allows, inside its band."""
    ranks: dict[str, int] = {}
    parts = {group[0]: group[0].split(".")[0] for group in groups}

    def rank(name: str) -> int:  # from the bottom of its part
        if name not in ranks:
            inside = [rank(below) for above, below in arrows if above == name and parts[below] == parts[name]]
            ranks[name] = 1 + max(inside, default=-1)
        return ranks[name]

    rows: dict[str, int] = {}
    bottom = 0
    for band in reversed(BANDS):
        members = [name for name, part in parts.items() if part in band]
        rows |= {name: bottom + rank(name) for name in members}
        bottom = 1 + max(rows[name] for name in members)
    return {name: bottom - 1 - row for name, row in rows.items()}


def items_of(graph: Graph) -> list[list[Item]]:
    """The rows of the picture, each arrow cut into pieces from one row to the next."""
    groups = groups_of(graph)
    arrows = arrows_of(graph, groups)
    rows = rows_of(groups, arrows)
    named = {group[0]: Item(rows[group[0]], group, group[0].split(".")[0]) for group in groups}
    lines: list[list[Item]] = [[] for _ in range(1 + max(rows.values()))]
    for item in named.values():
        lines[item.row].append(item)
    for above, below in arrows:
        upper = named[above]
        for row in range(upper.row + 1, named[below].row):
            passing = Item(row, part=named[below].part if named[below].part != "graphs" else named[above].part)
            lines[row].append(passing)
            join(upper, passing)
            upper = passing
        join(upper, named[below])
    return lines


def join(above: Item, below: Item) -> None:
    above.below.append(below)
    below.above.append(above)


def spans(lines: Sequence[Sequence[Item]]) -> dict[str, tuple[float, float]]:
    """Left and right end of each part; the parts of a band share its width in proportion to their widest rows."""
    found = {}
    for band in BANDS:
        needed = {
            part: max(sum(item.width + GAP for item in line if item.part == part) for line in lines) for part in band
        }
        free = WIDTH - 2 * MARGIN - GUTTER * (len(band) - 1)
        left = float(MARGIN)
        for part in band:
            right = left + free * needed[part] / sum(needed.values())
            found[part] = (left, right)
            left = right + GUTTER
    return found


def arrange(lines: Sequence[list[Item]]) -> None:
    """Set the position of every item: close to those that it is connected to, within the width of its part."""
    limits = spans(lines)
    for line in lines:
        line.sort(key=lambda item: (limits.get(item.part, (0.0, 0.0))[0], not item.boxes, item.name))
        spread(line, limits, {id(item): sum(limits[item.part]) / 2 for item in line})
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for line in lines if down else reversed(lines):
            wanted = {}
            for item in line:
                near = (item.above if down else item.below) or (item.above + item.below)
                wanted[id(item)] = sum(other.x for other in near) / len(near) if near else item.x
            line.sort(key=lambda item: (limits[item.part][0], wanted[id(item)]))
            spread(line, limits, wanted)


def spread(line: Sequence[Item], limits: Mapping[str, tuple[float, float]], wanted: Mapping[int, float]) -> None:
    """Set the items of a row as close as possible to where they are wanted, in order and without overlap."""
    for item in line:
        item.x = wanted[id(item)]
    for _ in range(60):
        for one, other in pairwise(line):
            if (lack := (one.width + other.width) / 2 + GAP - (other.x - one.x)) > 0:
                one.x -= lack / 2
                other.x += lack / 2
        for item in line:
            left, right = limits[item.part]
            half = item.width / 2 + INSIDE
            item.x = min(max(item.x, left + half), right - half)


PICTURE = ROOT / "docs" / "architecture.svg"
ROW, BAND = 68, 44  # pixels from row to row; extra space for a band's border and title

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; text-anchor: middle; }
  .title { font-weight: 600; text-anchor: start; }
  .note { font-size: 12px; text-anchor: start; }
  .paper, .box { fill: #ffffff; }
  .box, .frame, .arrow { stroke: #6e7781; }
  .frame, .arrow { fill: none; }
  .frame { stroke-dasharray: 4 3; }
  .arrow { stroke-width: 1.4; }
  .head { fill: #6e7781; }
  .tools { fill: #fff4d6; } .serving { fill: #ffe5dd; } .exporter { fill: #dff3e4; } .runtime { fill: #ddeaff; } .graphs { fill: #f1e4fb; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .paper, .box { fill: #0d1117; }
    .box, .frame, .arrow { stroke: #8b949e; }
    .head { fill: #8b949e; }
    .tools { fill: #33290f; } .serving { fill: #3a1d14; } .exporter { fill: #12301d; } .runtime { fill: #13294b; } .graphs { fill: #2d1b3d; }
  }
"""


def heights(lines: Sequence[Sequence[Item]]) -> list[float]:
    """The middle of each row; a band's title stands above its first one."""
    found: list[float] = []
    y = 0.0
    band = -1
    for line in lines:
        own = next(i for i, parts in enumerate(BANDS) for item in line if item.boxes and item.part in parts)
        y += ROW + (BAND if own != band else 0) if found else BAND + BOX
        band = own
        found.append(y)
    return found


def panels(lines: Sequence[Sequence[Item]], y: Sequence[float]) -> Iterator[str]:
    """A coloured panel with a title for each part; the panels of a band have the same height."""
    for part, (left, right) in spans(lines).items():
        band = next(parts for parts in BANDS if part in parts)
        own = [item.row for line in lines for item in line if item.boxes and item.part in band]
        top, bottom = y[min(own)] - BOX - 18, y[max(own)] + BOX
        yield (
            f'<rect class="{part}" x="{left:.0f}" y="{top:.0f}" width="{right - left:.0f}" '
            f'height="{bottom - top:.0f}" rx="8"/>'
        )
        yield f'<text class="title" x="{left + 12:.0f}" y="{top + 19:.0f}">{part}/</text>'


def draw(graph: Graph) -> str:
    """The picture of these imports."""
    lines = items_of(graph)
    arrange(lines)
    y = heights(lines)
    height = y[-1] + BOX + 70
    body = [f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="8"/>', *panels(lines, y)]
    body += [arrow(item, y) for line in lines for item in line if item.boxes and item.below]
    body += [shown for line in lines for item in line for shown in boxes_of(item, y[item.row])]
    note = "An arrow is an import. An arrow that follows from others is left out."
    if any(len(item.boxes) > 1 for line in lines for item in line):
        note += " Boxes in a dashed frame import each other."
    body.append(f'<text class="note" x="{MARGIN}" y="{height - 18:.0f}">{note}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="The packages of Spaceport and their imports">\n<style>{STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def boxes_of(item: Item, y: float) -> Iterator[str]:
    """The boxes of an item, and their frame if there are several."""
    if len(item.boxes) > 1:
        yield rect("frame", item.x, y, item.width, BOX + 2 * INSIDE)
    left = item.x - item.width / 2 + (INSIDE if len(item.boxes) > 1 else 0)
    for box in item.boxes:
        width = width_of(box)
        yield rect("box", left + width / 2, y, width, BOX)
        yield f'<text x="{left + width / 2:.0f}" y="{y + 4:.0f}">{box}</text>'
        left += width + GAP / 2


def rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" rx="5"/>'
    )


def arrow(item: Item, y: Sequence[float]) -> str:
    """The arrows that start at an item, each with its path through the rows and its head."""
    shown = []
    for index, lower in enumerate(sorted(item.below, key=lambda other: other.x)):
        x = item.x + (index - (len(item.below) - 1) / 2) * min(16.0, item.width / (len(item.below) + 1))
        upper, start = item, y[item.row] + edge(item)
        path = [f"M{x:.0f} {start:.0f}"]
        while True:
            end = y[lower.row] - edge(lower)
            entry = lower.x + (offset(upper, lower) if lower.boxes else 0)
            middle = (start + end) / 2
            path.append(f"C{x:.0f} {middle:.0f} {entry:.0f} {middle:.0f} {entry:.0f} {end:.0f}")
            if lower.boxes:
                break
            x, start = entry, y[lower.row] + edge(lower)
            path.append(f"V{start:.0f}")
            upper, lower = lower, lower.below[0]
        shown.append(f'<path class="arrow" d="{"".join(path)}"/>')
        shown.append(f'<path class="head" d="M{entry:.0f} {end:.0f}l-4.5 -8h9z"/>')
    return "\n".join(shown)


def edge(item: Item) -> float:
    return BOX / 2 + (INSIDE if len(item.boxes) > 1 else 0)


def offset(upper: Item, lower: Item) -> float:
    """Horizontal distance between the middle of a box and an arrow that ends there; several arrows end side by side."""
    order = sorted(lower.above, key=lambda other: other.x)
    order_of = next(i for i, other in enumerate(order) if other is upper)
    return (order_of - (len(order) - 1) / 2) * min(16.0, lower.width / (len(order) + 1))


if __name__ == "__main__":
    PICTURE.write_text(draw(imports_between_boxes()), "utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: written")
