"""Plots: the figures of a benchmark as an SVG picture, with bars that have a range, and lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from spaceport.tools.bench.report import Spread, short_number

_COLOURS = (
    *("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7"),
    *("#e69f00", "#7f7f7f", "#8c564b", "#1b1b1b", "#bcbd22"),
)
_WIDTH, _LABELS, _VALUES, _MARGIN, _TITLE = 720.0, 190.0, 70.0, 16.0, 26.0  # pixels
_BAR, _GAP = 14.0, 6.0  # of a bar
_LINES, _LEFT, _LEGEND = 200.0, 60.0, 200.0  # of a chart
_STYLE = "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.last{text-anchor:end}"


@dataclass(frozen=True)
class Panel:
    """The bars of one figure, one per subject."""

    title: str
    bars: Sequence[tuple[str, Spread]]  # subject, value

    @property
    def height(self) -> float:
        return _TITLE + len(self.bars) * (_BAR + _GAP) + _MARGIN


@dataclass(frozen=True)
class Chart:
    """The lines of one figure, one per subject, from 0 on both axes."""

    title: str
    lines: Sequence[tuple[str, Sequence[tuple[int, float]]]]  # subject, points
    most: float = 0.0  # highest value of the vertical axis; 0: that of the lines

    @property
    def height(self) -> float:
        return _LINES + _TITLE + 3 * _MARGIN


def _spelled(value: str | float) -> str:
    """A number rounded to one decimal; text as it is."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def add(parent: Element, tag: str, attributes: Mapping[str, str | float] | None = None, text: str = "") -> Element:
    """A new element at the end of another."""
    element = ElementTree.SubElement(parent, tag, {name: _spelled(value) for name, value in (attributes or {}).items()})
    element.text = text
    return element


def path(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path of straight lines through the points."""
    return "M" + " L".join(f"{_spelled(x)} {_spelled(y)}" for x, y in points)


def plot_of(label: str, title: str, subjects: Iterable[str], parts: Sequence[Panel | Chart], subtitle: str = "") -> str:
    """The picture as SVG text; a subject has the same colour in all parts."""
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(dict.fromkeys(subjects))}
    top = _TITLE * (2 if subtitle else 1)
    height = top + sum(part.height for part in parts)
    size: dict[str, str | float] = {
        "width": _WIDTH,
        "height": height,
        "viewBox": f"0 0 {_spelled(_WIDTH)} {_spelled(height)}",
    }
    named = {"xmlns": "http://www.w3.org/2000/svg", "role": "group", "aria-label": label}
    drawing = Element("svg", {name: _spelled(value) for name, value in {**size, **named}.items()})
    add(drawing, "style", text=_STYLE)
    add(drawing, "rect", {"width": _WIDTH, "height": height, "fill": "#fff"})
    add(drawing, "text", {"x": _MARGIN, "y": 18, "class": "title"}, title)
    if subtitle:
        add(drawing, "text", {"x": _MARGIN, "y": _TITLE + 12}, subtitle)
    for part in parts:
        add(drawing, "text", {"x": _MARGIN, "y": top + 16, "class": "title"}, part.title)
        if isinstance(part, Panel):
            _draw_bars(drawing, part, colours, top + _TITLE)
        else:
            _draw_lines(drawing, part, colours, top + _TITLE + _LINES)
        top += part.height
    return ElementTree.tostring(drawing, encoding="unicode") + "\n"


def _draw_bars(drawing: Element, panel: Panel, colours: dict[str, str], top: float) -> None:
    """Draw the bars of a panel, each with its range."""
    most = max((spread.high for _, spread in panel.bars), default=0.0) or 1.0
    scale = (_WIDTH - _LABELS - _VALUES - _MARGIN) / most
    for index, (name, spread) in enumerate(panel.bars):
        y = top + index * (_BAR + _GAP)
        add(drawing, "text", {"x": _LABELS - 8, "y": y + 11, "class": "last"}, name)
        size: dict[str, str | float] = {"x": _LABELS, "y": y, "width": max(1.0, spread.median * scale), "height": _BAR}
        add(drawing, "rect", {**size, "fill": colours[name]})
        ends = [(_LABELS + value * scale, y + _BAR / 2) for value in (spread.low, spread.high)]
        add(drawing, "path", {"d": path(ends), "stroke": "#222", "fill": "none"})
        add(drawing, "text", {"x": ends[1][0] + 6, "y": y + 11}, short_number(spread.median))


def _draw_lines(drawing: Element, chart: Chart, colours: dict[str, str], base: float) -> None:
    """Draw the lines of a chart above its base, with both axes and a legend."""
    points = [point for _, line in chart.lines for point in line]
    most = chart.most or max((y for _, y in points), default=0.0) or 1.0
    right, columns = _WIDTH - _LEGEND, sorted({x for x, _ in points})
    across, up = (right - _LEFT) / max(columns, default=1), _LINES / most
    frame = path([(_LEFT, base - _LINES), (_LEFT, base), (right, base)])
    add(drawing, "path", {"d": frame, "stroke": "#999", "fill": "none"})
    for share in (0.0, 0.5, 1.0):
        place: dict[str, str | float] = {"x": _LEFT - 6, "y": base - share * _LINES + 4, "class": "last"}
        add(drawing, "text", place, f"{most * share:.3g}")
    for x in columns:
        add(drawing, "text", {"x": _LEFT + x * across, "y": base + 16, "text-anchor": "middle"}, str(x))
    for index, (name, line) in enumerate(chart.lines):
        places = [(_LEFT + x * across, base - y * up) for x, y in line]
        add(drawing, "path", {"d": path(places), "stroke": colours[name], "stroke-width": 2, "fill": "none"})
        for x_place, y_place in places:
            add(drawing, "circle", {"cx": x_place, "cy": y_place, "r": 3, "fill": colours[name]})
        y_legend = base - _LINES + index * 18
        square: dict[str, str | float] = {
            "x": right + 16,
            "y": y_legend - 9,
            "width": 10,
            "height": 10,
            "fill": colours[name],
        }
        add(drawing, "rect", square)
        add(drawing, "text", {"x": right + 32, "y": y_legend}, name)
