"""Lane drawing: a lane for each thread over the steps, with lines from each fork to its child thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.runtime.trace.record import TraceRecord
from spaceport.tools.report.drawing import Attributes, Element, add, path, picture
from spaceport.tools.report.lanes import Cell, TraceLane, describe
from spaceport.tools.report.scale import LABELS, Scale
from spaceport.tools.report.words import counted

HUES = 6  # number of thread colours

_GAP = 5.0  # pixels between two columns, for the lines of forks
_STACK = 54.0  # maximum height of the tokens of a step
_THICKEST, _THINNEST = 9.0, 3.0  # height of a token
_REJECTED = 12.0  # height of the box with the number of rejected candidates
_LOWEST = 42.0  # minimum height of a lane, for two lines of text
_AXIS = 24.0


@dataclass(frozen=True)
class _Sheet:
    """The layout of the drawing."""

    scale: Scale
    thick: float  # height of a token in pixels
    bases: dict[int, float]  # thread -> y of the line below its tokens
    bottoms: tuple[float, ...]  # lower edge of each lane

    @property
    def height(self) -> float:
        return self.bottoms[-1] + _AXIS


def draw_lanes(record: TraceRecord, lanes: Sequence[TraceLane], scale: Scale) -> tuple[Element, Element]:
    """The names of the lanes and the lanes, as two drawings side by side."""
    sheet = _sheet(lanes, scale)
    names = picture(LABELS, sheet.height, "The threads in reading order")
    drawing = picture(scale.width, sheet.height, "The tokens of each thread in each step")
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


def _sheet(lanes: Sequence[TraceLane], scale: Scale) -> _Sheet:
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
    return _Sheet(scale, thick, bases, tuple(bottoms) or (_AXIS,))


def _draw_ground(names: Element, drawing: Element, sheet: _Sheet) -> None:
    """Draw the background: bands for every other lane, grid lines and step numbers."""
    tops = (_AXIS, *sheet.bottoms)
    for index in range(0, len(sheet.bottoms), 2):
        band: Attributes = {"y": tops[index], "height": tops[index + 1] - tops[index], "class": "band"}
        add(names, "rect", {**band, "x": 0, "width": LABELS})
        add(drawing, "rect", {**band, "x": 0, "width": sheet.scale.width})
    add(names, "text", {"x": LABELS - 8, "y": _AXIS - 8, "class": "axis last"}, "step")
    bottom = sheet.bottoms[-1]
    for step in sheet.scale.ticks:
        x = sheet.scale.middle(step) + _GAP / 2
        add(drawing, "line", {"x1": x, "x2": x, "y1": _AXIS, "y2": bottom, "class": "grid"})
        for y in (_AXIS - 8, bottom + 15):
            add(drawing, "text", {"x": x, "y": y, "class": "axis"}, str(step))


def _draw_name(names: Element, lane: TraceLane, sheet: _Sheet) -> None:
    x, y = 8 + 12 * min(lane.depth, 5), sheet.bases[lane.thread]
    group = add(names, "g", {"id": f"lane-{lane.thread}", "class": hue(lane)})
    add(group, "rect", {"x": x, "y": y - 21, "width": 9, "height": 9, "rx": 2, "class": "accepted"})
    add(group, "text", {"x": x + 14, "y": y - 13, "class": "name"}, lane.name)
    ending = f" · {lane.record.ending}" if lane.record.ending else ""
    add(group, "text", {"x": x + 14, "y": y + 1, "class": "axis first"}, f"{counted(lane.generated, 'token')}{ending}")


def _draw_line(drawing: Element, lane: TraceLane, sheet: _Sheet) -> None:
    """Draw the line below a thread's tokens and the line from its fork."""
    scale, base = sheet.scale, sheet.bases[lane.thread]
    group = add(drawing, "g", {"class": f"way {hue(lane)}"})
    first = lane.cells[0].step if lane.cells else lane.forked + lane.queued + 1
    if lane.depth:
        parent, x, tip = sheet.bases[lane.parent], scale.left(lane.forked + 1) + 1, scale.left(first) + _GAP
        add(group, "path", {"d": path([(x, parent), (x, base)]), "class": "fork"})
        add(group, "circle", {"cx": x, "cy": parent, "r": 2, "class": "root"})
        if lane.queued:
            add(group, "path", {"d": path([(x, base), (tip - 5, base)]), "class": "wait"})
        if lane.cells:
            head = [(tip, base), (tip - 5, base - 3.5), (tip - 5, base + 3.5)]
            add(group, "path", {"d": f"{path(head)}Z", "class": "root"})
    if lane.cells:
        ends = scale.left(first) + _GAP, scale.left(lane.cells[-1].step + 1)
        add(group, "path", {"d": path([(x, base) for x in ends]), "class": "life"})
    elif lane.record.ending:
        _draw_end(group, scale.left(first) + 1, base, sheet)


def _draw_cell(drawing: Element, record: TraceRecord, lane: TraceLane, cell: Cell, sheet: _Sheet) -> None:
    """Draw the marks of a thread's tokens in a step, linked to their text."""
    rows, base = cell.rows, sheet.bases[lane.thread]
    x, width = sheet.scale.left(cell.step) + _GAP, sheet.scale.column - _GAP
    group = add(drawing, "a" if rows.generated else "g", {"class": f"cell {hue(lane)}"})
    if rows.generated:
        group.set("href", f"#s{cell.step}-{lane.thread}")
    add(group, "title", text=describe(record, cell))
    top, bottom = base - max(2, rows.generated) * sheet.thick - 3, base + _REJECTED + 5
    add(group, "rect", {"x": x - 2, "y": top, "width": width + 4, "height": bottom - top, "class": "hit"})
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
