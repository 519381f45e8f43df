"""Row layout: boxes in rows, each below all boxes that import it and close to those that it is connected to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from import_graph import Graph, arrows_of, groups_of

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
