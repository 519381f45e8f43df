"""Picture: the threads and steps of a generation as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element as Element

from spaceport.runtime.trace import TraceRecord
from spaceport.serving.page.modules import style
from spaceport.tools.report.lanes import Cell, TraceLane, counted, describe, lanes_of, statistics_of, visible

Attributes = Mapping[str, str | float]

COLOURS, MARKS = style("colours"), style("marks")
HUES = 6  # number of thread colours
_STYLE = COLOURS + MARKS + ".paper { fill: var(--paper); } .title { font-size: 15px; font-weight: 600; }\n"
_MARGIN = 12.0  # pixels, as all lengths here
_HEAD = 52.0  # title and subtitle
_LABELS = 172.0  # left of the lanes, for their names
_STEPS = 980.0  # all steps together, if they fit
_WIDEST, _NARROWEST = 48.0, 16.0  # a step
_SHORTEST = 560.0  # width, so that the title fits over few steps
_GAP = 5.0  # between two columns, for the lines of forks
_STACK = 54.0  # maximum height of the tokens of a step
_THICKEST, _THINNEST = 9.0, 3.0  # height of a token
_REJECTED = 12.0  # height of the box with the number of rejected candidates
_LOWEST = 42.0  # minimum height of a lane, for two lines of text
_AXIS = 24.0
_LINE = 20.0  # a line of the legend
_CHARACTER = 6.2  # width of a character in the legend, rounded up
# CSS class of a mark and its meaning
_MEANINGS = (
    ("accepted", "accepted draft token"),
    ("own", "own token of the model"),
    ("forks", "[Fork] token"),
    ("rejected", "number of rejected draft tokens"),
    ("wait", "thread is queued"),
    ("prompt", "prefill step"),
    ("end", "end of a thread"),
)


def new(tag: str, attributes: Attributes | None = None, text: str = "") -> Element:
    """An element."""
    element = Element(tag, {name: spelled(value) for name, value in (attributes or {}).items()})
    element.text = text
    return element


def add(parent: Element, tag: str, attributes: Attributes | None = None, text: str = "") -> Element:
    """A new element at the end of another."""
    element = new(tag, attributes, text)
    parent.append(element)
    return element


def picture(width: float, height: float, label: str) -> Element:
    """An empty SVG of this size in pixels."""
    size: Attributes = {"width": width, "height": height, "viewBox": f"0 0 {spelled(width)} {spelled(height)}"}
    return new("svg", {**size, "role": "group", "aria-label": label})


def path(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path of straight lines through the points."""
    return "M" + " L".join(f"{spelled(x)} {spelled(y)}" for x, y in points)


def spelled(value: str | float) -> str:
    """A number rounded to one decimal; text as it is."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def mark(kind: str) -> Element:
    """The mark of a CSS class as a small picture."""
    drawing = new("svg", {"width": 20, "height": 12, "viewBox": "0 0 20 12", "aria-hidden": "true"})
    if kind == "wait":
        add(drawing, "path", {"d": "M0 6 H20", "class": kind})
    elif kind == "end":
        add(drawing, "path", {"d": "M10 0 V12", "class": kind})
    elif kind == "forks":
        add(drawing, "circle", {"cx": 10, "cy": 6, "r": 2.5, "class": kind})
    else:
        add(drawing, "rect", {"x": 1, "y": 1, "width": 18, "height": 10, "rx": 1.5, "class": kind})
    if kind == "rejected":
        add(drawing, "text", {"x": 10, "y": 9, "class": "count"}, "3")
    return drawing


@dataclass(frozen=True)
class _Sheet:
    """The layout of the lanes: a column of equal width for each step, counted from 1."""

    steps: int
    column: float  # width of a step; many steps are wider than a page
    thick: float  # height of a token
    bases: dict[int, float]  # thread -> y of the line below its tokens
    bottoms: tuple[float, ...]  # lower edge of each lane

    @property
    def width(self) -> float:
        return self.steps * self.column + 8

    @property
    def height(self) -> float:
        return self.bottoms[-1] + _AXIS

    def left(self, step: int) -> float:
        """The left edge of a step's column."""
        return (step - 1) * self.column

    @property
    def ticks(self) -> range:
        """The steps that are labelled with their number."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if n * self.column >= 30)
        return range(every, self.steps + 1, every)


def draw_lanes(record: TraceRecord) -> tuple[Element, Element]:
    """The names of the lanes and the lanes, as two drawings side by side."""
    lanes = lanes_of(record)
    sheet = _sheet(lanes, max(1, len(record.steps)))
    names = picture(_LABELS, sheet.height, "The threads in reading order")
    drawing = picture(sheet.width, sheet.height, "The tokens of each thread in each step")
    _draw_ground(names, drawing, sheet)
    for lane in lanes:
        _draw_name(names, lane, sheet)
    for lane in lanes:
        _draw_line(drawing, lane, sheet)
    for lane in lanes:
        for cell in lane.cells:
            _draw_cell(drawing, record, lane, cell, sheet)
    return names, drawing


def hue(lane: TraceLane) -> str:
    """The CSS class with the colour of a thread; neighbouring lanes differ."""
    return f"t{lane.order % HUES}"


def _sheet(lanes: Sequence[TraceLane], steps: int) -> _Sheet:
    column = min(_WIDEST, max(_NARROWEST, _STEPS // steps))  # wide enough to distinguish tokens
    most = max((lane.most for lane in lanes), default=1)
    thick = min(_THICKEST, max(_THINNEST, _STACK / max(1, most)))
    bases: dict[int, float] = {}
    bottoms: list[float] = []
    end = _AXIS
    for lane in lanes:
        below = _REJECTED + 4 if any(cell.rejected for cell in lane.cells) else 4
        above = max(lane.most * thick, _LOWEST - below - 12)
        bases[lane.thread] = end + 8 + above
        end += 8 + above + below + 4
        bottoms.append(end)
    return _Sheet(steps, column, thick, bases, tuple(bottoms) or (_AXIS,))


def _draw_ground(names: Element, drawing: Element, sheet: _Sheet) -> None:
    """Draw the background: bands for every other lane, grid lines and step numbers."""
    tops = (_AXIS, *sheet.bottoms)
    for index in range(0, len(sheet.bottoms), 2):
        band: Attributes = {"y": tops[index], "height": tops[index + 1] - tops[index], "class": "band"}
        add(names, "rect", {**band, "x": 0, "width": _LABELS})
        add(drawing, "rect", {**band, "x": 0, "width": sheet.width})
    add(names, "text", {"x": _LABELS - 8, "y": _AXIS - 8, "class": "axis last"}, "step")
    bottom = sheet.bottoms[-1]
    for step in sheet.ticks:
        x = sheet.left(step) + (sheet.column + _GAP) / 2
        add(drawing, "line", {"x1": x, "x2": x, "y1": _AXIS, "y2": bottom, "class": "grid"})
        for y in (_AXIS - 8, bottom + 15):
            add(drawing, "text", {"x": x, "y": y, "class": "axis"}, str(step))


def _draw_name(names: Element, lane: TraceLane, sheet: _Sheet) -> None:
    x, y = 8 + 12 * min(lane.depth, 5), sheet.bases[lane.thread]
    group = add(names, "g", {"class": hue(lane)})
    add(group, "rect", {"x": x, "y": y - 21, "width": 9, "height": 9, "rx": 2, "class": "accepted"})
    add(group, "text", {"x": x + 14, "y": y - 13, "class": "name"}, lane.name)
    ending = f" · {lane.record.ending}" if lane.record.ending else ""
    add(group, "text", {"x": x + 14, "y": y + 1, "class": "axis first"}, f"{counted(lane.generated, 'token')}{ending}")


def _draw_line(drawing: Element, lane: TraceLane, sheet: _Sheet) -> None:
    """Draw the line below a thread's tokens and the line from its fork."""
    base = sheet.bases[lane.thread]
    group = add(drawing, "g", {"class": f"way {hue(lane)}"})
    first = lane.cells[0].step if lane.cells else lane.forked + lane.queued + 1
    if lane.depth:
        parent, x, tip = sheet.bases[lane.parent], sheet.left(lane.forked + 1) + 1, sheet.left(first) + _GAP
        add(group, "path", {"d": path([(x, parent), (x, base)]), "class": "fork"})
        add(group, "circle", {"cx": x, "cy": parent, "r": 2, "class": "root"})
        if lane.queued:
            add(group, "path", {"d": path([(x, base), (tip - 5, base)]), "class": "wait"})
        if lane.cells:
            head = [(tip, base), (tip - 5, base - 3.5), (tip - 5, base + 3.5)]
            add(group, "path", {"d": f"{path(head)}Z", "class": "root"})
    if lane.cells:
        ends = sheet.left(first) + _GAP, sheet.left(lane.cells[-1].step + 1)
        add(group, "path", {"d": path([(x, base) for x in ends]), "class": "life"})
    elif lane.record.ending:
        _draw_end(group, sheet.left(first) + 1, base, sheet)


def _draw_cell(drawing: Element, record: TraceRecord, lane: TraceLane, cell: Cell, sheet: _Sheet) -> None:
    """Draw the marks of a thread's tokens in a step."""
    rows, base = cell.rows, sheet.bases[lane.thread]
    x, width = sheet.left(cell.step) + _GAP, sheet.column - _GAP
    group = add(drawing, "g", {"class": f"cell {hue(lane)}"})
    add(group, "title", text=describe(record, cell))
    for index, token in enumerate(rows.text):
        y = base - (index + 1) * sheet.thick
        _draw_token(group, x, y, width, sheet.thick - 1, index < rows.accepted)
        if token == record.tokens.fork:
            middle = {"cx": x + width / 2, "cy": y + (sheet.thick - 1) / 2}
            add(group, "circle", {**middle, "r": min(2, sheet.thick / 3), "class": "forks"})
    if not rows.chosen:
        height = 2 * sheet.thick
        add(group, "rect", {"x": x, "y": base - height, "width": width, "height": height - 1, "class": "prompt"})
    if cell.rejected:
        box = {"x": x + 0.5, "y": base + 3.5, "width": width - 1, "height": _REJECTED - 1, "rx": 2}
        add(group, "rect", {**box, "class": "rejected"})
        add(group, "text", {"x": x + width / 2, "y": base + 12, "class": "count"}, str(len(cell.rejected)))
    if cell.ending:
        _draw_end(group, x + width + 1.5, base, sheet)


def _draw_token(group: Element, x: float, y: float, width: float, height: float, accepted: bool) -> None:
    inset = 0.0 if accepted else 0.75  # half the width of its outline
    box = {"x": x + inset, "y": y + inset, "width": width - 2 * inset, "height": height - 2 * inset, "rx": 1.5}
    add(group, "rect", {**box, "class": "accepted" if accepted else "own"})


def _draw_end(group: Element, x: float, base: float, sheet: _Sheet) -> None:
    """Draw the bar at the end of a thread."""
    add(group, "path", {"d": path([(x, base + 3), (x, base - max(2 * sheet.thick, 12))]), "class": "end"})


@dataclass(frozen=True)
class _Entry:
    """A legend entry with its position."""

    kind: str
    meaning: str
    x: float
    line: int


def figure_of(record: TraceRecord, title: str) -> str:
    """The SVG of a generation: a lane per thread, a column per step, a mark per token."""
    names, drawing = draw_lanes(record)
    height = float(names.attrib["height"])
    width = max(_SHORTEST, _LABELS + float(drawing.attrib["width"])) + 2 * _MARGIN
    used = {element.get("class", "") for element in drawing.iter()}
    entries = list(_legend(used, width))
    bottom = _HEAD + height + _LINE * (1 + max((entry.line for entry in entries), default=0)) + 2 * _MARGIN
    root = new("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {spelled(width)} {spelled(bottom)}"})
    root.attrib |= {"width": spelled(width), "height": spelled(bottom), "role": "img", "aria-label": visible(title)}
    add(root, "style", text=_STYLE)
    add(root, "rect", {"width": width, "height": bottom, "rx": 8, "class": "paper"})
    add(root, "text", {"x": _MARGIN, "y": 24, "class": "title"}, visible(title))
    add(root, "text", {"x": _MARGIN, "y": 42, "class": "axis first"}, _summary(record))
    for part, x in ((names, _MARGIN), (drawing, _MARGIN + _LABELS)):
        part.attrib |= {"x": spelled(x), "y": spelled(_HEAD)}
        root.append(part)
    for entry in entries:
        _draw_entry(root, entry, _HEAD + height + _MARGIN + entry.line * _LINE)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False) + "\n"


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
    for kind, meaning in _MEANINGS:
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
