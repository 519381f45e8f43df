"""Figure: the threads and steps of a generation as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spaceport.runtime.trace.record import TraceRecord
from spaceport.tools.report.drawing import Element, add, markup, new, spelled
from spaceport.tools.report.lane_drawing import draw_lanes
from spaceport.tools.report.lane_style import COLOURS, MARKS
from spaceport.tools.report.lanes import lanes_of
from spaceport.tools.report.legend import LANES, mark
from spaceport.tools.report.numbers import statistics_of
from spaceport.tools.report.scale import LABELS, scale_for_lanes
from spaceport.tools.report.words import counted, visible

_STYLE = COLOURS + MARKS + ".paper { fill: var(--paper); } .title { font-size: 15px; font-weight: 600; }\n"
_MARGIN = 12.0
_HEAD = 52.0  # title and subtitle
_LINE = 20.0  # a line of the legend
_CHARACTER = 6.2  # pixels of a character in the legend, rounded up
_SHORTEST = 560.0  # pixels, so that the title fits over few steps


@dataclass(frozen=True)
class _Entry:
    """A legend entry with its position."""

    kind: str
    meaning: str
    x: float
    line: int


def figure_of(record: TraceRecord, title: str) -> str:
    """The SVG of a generation: a lane per thread, a column per step, a mark per token."""
    lanes = lanes_of(record)
    names, drawing = draw_lanes(record, lanes, scale_for_lanes(max(1, len(record.steps))))
    height = float(names.attrib["height"])
    width = max(_SHORTEST, LABELS + float(drawing.attrib["width"])) + 2 * _MARGIN
    used = {element.get("class", "") for element in drawing.iter()}
    entries = list(_legend(used, width))
    bottom = _HEAD + height + _LINE * (1 + max((entry.line for entry in entries), default=0)) + 2 * _MARGIN
    root = new("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {spelled(width)} {spelled(bottom)}"})
    root.attrib |= {"width": spelled(width), "height": spelled(bottom), "role": "img", "aria-label": visible(title)}
    add(root, "style", text=_STYLE)
    add(root, "rect", {"width": width, "height": bottom, "rx": 8, "class": "paper"})
    add(root, "text", {"x": _MARGIN, "y": 24, "class": "title"}, visible(title))
    add(root, "text", {"x": _MARGIN, "y": 42, "class": "axis first"}, _summary(record))
    for part, x in ((names, _MARGIN), (_without_links(drawing), _MARGIN + LABELS)):
        part.attrib |= {"x": spelled(x), "y": spelled(_HEAD)}
        root.append(part)
    for entry in entries:
        _draw_entry(root, entry, _HEAD + height + _MARGIN + entry.line * _LINE)
    return f"{markup(root)}\n"


def _summary(record: TraceRecord) -> str:
    """Tokens, steps, accepted draft tokens and threads in one line."""
    statistics = statistics_of(record)
    drafted, accepted = sum(statistics.drafted_by_depth), sum(statistics.accepted_by_depth)
    return (
        f"{counted(statistics.tokens, 'token')} in {counted(statistics.steps, 'decode step')}: "
        f"{statistics.tokens_per_step:.2f} tokens per step; {accepted} of {counted(drafted, 'draft token')} accepted; "
        f"{counted(statistics.threads, 'thread')}"
    )


def _legend(used: set[str], width: float) -> Iterator[_Entry]:
    """Legend entries of the marks that occur, in lines of this width."""
    x, line = _MARGIN, 0
    for kind, meaning in LANES:
        if kind in used:
            size = 26 + _CHARACTER * len(meaning) + 16
            if x + size > width and x > _MARGIN:
                x, line = _MARGIN, line + 1
            yield _Entry(kind, meaning, x, line)
            x += size


def _draw_entry(root: Element, entry: _Entry, y: float) -> None:
    key = mark(entry.kind)
    key.attrib |= {"x": spelled(entry.x), "y": spelled(y), "class": "t0"}
    root.append(key)
    add(root, "text", {"x": entry.x + 26, "y": y + 10, "class": "axis first"}, entry.meaning)


def _without_links(drawing: Element) -> Element:
    """The lanes without the links and hover areas of the HTML page."""
    for element in drawing.iter():
        element.attrib.pop("href", None)
        if element.tag == "a":
            element.tag = "g"
        for child in [child for child in element if child.get("class") == "hit"]:
            element.remove(child)
    return drawing
