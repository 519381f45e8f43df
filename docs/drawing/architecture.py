"""Architecture drawing: docs/architecture.svg, the packages and their imports, generated from the sources.

Run `python docs/drawing/architecture.py` after a change of imports between packages; a test compares the picture with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from import_graph import ROOT, Graph, imports_between_boxes
from row_layout import BANDS, BOX, GAP, INSIDE, MARGIN, WIDTH, Item, arrange, items_of, spans, width_of

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
