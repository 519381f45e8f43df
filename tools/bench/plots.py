"""Plots: benchmarks as SVG pictures, with bars for figures and lines for step times and acceptance rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from spaceport.tools.bench.compare import Comparison, Spread
from spaceport.tools.bench.compare_measuring import Metric
from spaceport.tools.bench.decode import REPLAY_LABEL, DecodeResults, ModeSummary
from spaceport.tools.bench.decode_measuring import PLAIN
from spaceport.tools.bench.report import short_number
from spaceport.tools.report.picture import Element, add, path, picture

COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#e69f00",
    "#7f7f7f",
    "#8c564b",
    "#1b1b1b",
    "#bcbd22",
)
WIDTH, _LABELS, _VALUES, MARGIN = 720.0, 190.0, 70.0, 16.0  # pixels
_BAR, _GAP, TITLE, _STEP_LINES = 14.0, 6.0, 26.0, 220.0
_RATE_LINES, _LEFT, _LEGEND = 180.0, 60.0, 200.0  # pixels


@dataclass(frozen=True)
class Panel:
    """The bars of one metric, one per subject."""

    title: str
    bars: tuple[tuple[str, str, Spread], ...]  # subject, colour, value

    @property
    def height(self) -> float:
        return TITLE + len(self.bars) * (_BAR + _GAP) + MARGIN


def comparison_plot(comparison: Comparison) -> str:
    """The picture as SVG text."""
    colours = {subject.name: COLOURS[i % len(COLOURS)] for i, subject in enumerate(comparison.subjects)}
    panels = _comparison_panels(comparison, colours)
    steps = [metric for metric in comparison.metrics if metric.call == "rows"]
    lines = _STEP_LINES + TITLE + MARGIN * 3 if len(steps) > 1 else 0.0
    height = TITLE + sum(panel.height for panel in panels) + lines
    title = f"{comparison.checkpoint}, {comparison.threads} thread(s), {comparison.machine.cpu}"
    drawing = blank(height, f"Comparison of runtimes on {comparison.checkpoint}", title)
    top = TITLE
    for panel in panels:
        draw_bars(drawing, panel, top)
        top += panel.height
    if len(steps) > 1:
        _draw_steps(drawing, comparison, steps, colours, top)
    return ElementTree.tostring(drawing, encoding="unicode") + "\n"


def _comparison_panels(comparison: Comparison, colours: dict[str, str]) -> list[Panel]:
    found = []
    for metric in comparison.metrics:
        if metric.call != "rows":
            better = "lower" if metric.unit == "ms" else "higher"
            bars = tuple(
                (subject.name, colours[subject.name], subject.results[metric.name].spread)
                for subject in comparison.subjects
                if metric.name in subject.results
            )
            found.append(Panel(f"{metric.name}, {metric.unit} ({better} is better)", bars))
    memory = tuple(
        (subject.name, colours[subject.name], Spread(*[subject.resident_bytes_decode / 1e6] * 3))
        for subject in comparison.subjects
    )
    return [*found, Panel("resident memory after decode, MB (lower is better)", memory)]


def blank(height: float, label: str, title: str) -> Element:
    """An empty picture with a title."""
    drawing = picture(WIDTH, height, label)
    drawing.set("xmlns", "http://www.w3.org/2000/svg")
    add(drawing, "style", text="text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.last{text-anchor:end}")
    add(drawing, "rect", {"width": WIDTH, "height": height, "fill": "#fff"})
    add(drawing, "text", {"x": MARGIN, "y": 18, "class": "title"}, title)
    return drawing


def draw_bars(drawing: Element, panel: Panel, top: float) -> None:
    """Draw the bars of a panel, each with its range."""
    add(drawing, "text", {"x": MARGIN, "y": top + 16, "class": "title"}, panel.title)
    most = max((spread.high for _, _, spread in panel.bars), default=0.0) or 1.0
    scale = (WIDTH - _LABELS - _VALUES - MARGIN) / most
    for index, (name, colour, spread) in enumerate(panel.bars):
        y = top + TITLE + index * (_BAR + _GAP)
        add(drawing, "text", {"x": _LABELS - 8, "y": y + 11, "class": "last"}, name)
        size = {"x": _LABELS, "y": y, "width": max(1.0, spread.median * scale), "height": _BAR}
        add(drawing, "rect", {**size, "fill": colour})
        ends = [(_LABELS + value * scale, y + _BAR / 2) for value in (spread.low, spread.high)]
        add(drawing, "path", {"d": path(ends), "stroke": "#222", "fill": "none"})
        add(drawing, "text", {"x": ends[1][0] + 6, "y": y + 11}, short_number(spread.median))


def _draw_steps(
    drawing: Element, comparison: Comparison, steps: Sequence[Metric], colours: dict[str, str], top: float
) -> None:
    add(
        drawing,
        "text",
        {"x": MARGIN, "y": top + 16, "class": "title"},
        "Time per step by number of rows, ms (lower is better)",
    )
    subjects = [s for s in comparison.subjects if any(metric.name in s.results for metric in steps)]
    most = max((s.results[m.name].spread.median for s in subjects for m in steps if m.name in s.results), default=1.0)
    left, right, base = 60.0, WIDTH - 200.0, top + TITLE + _STEP_LINES
    across, up = (right - left) / max(metric.size for metric in steps), _STEP_LINES / most
    add(
        drawing,
        "path",
        {"d": path([(left, base - _STEP_LINES), (left, base), (right, base)]), "stroke": "#999", "fill": "none"},
    )
    for share in (0.5, 1.0):
        add(
            drawing,
            "text",
            {"x": left - 6, "y": base - share * _STEP_LINES + 4, "class": "last"},
            short_number(most * share),
        )
    for metric in steps:
        x = left + metric.size * across
        add(drawing, "text", {"x": x, "y": base + 16, "text-anchor": "middle"}, str(metric.size))
    for index, subject in enumerate(subjects):
        points = [
            (left + metric.size * across, base - subject.results[metric.name].spread.median * up)
            for metric in steps
            if metric.name in subject.results
        ]
        colour = colours[subject.name]
        add(drawing, "path", {"d": path(points), "stroke": colour, "stroke-width": 2, "fill": "none"})
        y = base - _STEP_LINES + index * 18
        add(drawing, "rect", {"x": right + 12, "y": y - 9, "width": 10, "height": 10, "fill": colour})
        add(drawing, "text", {"x": right + 28, "y": y}, subject.name)


def decode_plot(report: DecodeResults) -> str:
    """The picture as SVG text."""
    names = dict.fromkeys(mode.mode for mode in report.modes)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    panels = list(_decode_panels(report, colours))
    drafting = [modes for modes in _by_temperature(report) if any(mode.by_depth for mode in modes)]
    lines = _RATE_LINES + TITLE + 3 * MARGIN
    top = TITLE * 2 if report.replay else TITLE
    height = top + sum(panel.height for panel in panels) + lines * len(drafting)
    machine = f"{report.options.threads or 'all'} thread(s), {report.machine.cpu}"
    drawing = blank(height, f"Speedup of drafts on {report.bundle}", f"{report.bundle}, {machine}")
    if report.options.replay is not None:
        rates = ", ".join(f"{rate:g}" for rate in report.options.replay)
        add(drawing, "text", {"x": MARGIN, "y": TITLE + 12}, f"{REPLAY_LABEL}: {rates}")
    for panel in panels:
        draw_bars(drawing, panel, top)
        top += panel.height
    for modes in drafting:
        _draw_rates(drawing, modes, colours, top)
        top += lines
    return ElementTree.tostring(drawing, encoding="unicode") + "\n"


def _by_temperature(report: DecodeResults) -> Iterator[list[ModeSummary]]:
    for temperature in report.options.temperatures:
        yield [mode for mode in report.modes if mode.temperature == temperature]


def _decode_panels(report: DecodeResults, colours: dict[str, str]) -> Iterator[Panel]:
    for modes in _by_temperature(report):
        at = f"temperature {modes[0].temperature:g}"
        speedups = tuple((mode.mode, colours[mode.mode], spread) for mode in modes if (spread := _speedup(mode)))
        first = tuple(
            (mode.mode, colours[mode.mode], Spread(*(p * 1e3 for p in (p50, p50, mode.first_token_p95))))
            for mode in modes
            if (p50 := mode.first_token_p50)
        )
        if len(speedups) > 1:
            yield Panel(f"speedup over plain decoding, 95 % interval, {at} (higher is better)", speedups)
        yield Panel(f"time to first token, p50 to p95, ms, {at} (lower is better)", first)


def _speedup(mode: ModeSummary) -> Spread | None:
    if mode.mode == PLAIN:
        return Spread(1.0, 1.0, 1.0)
    return None if mode.speedup is None else Spread(mode.speedup.mean, mode.speedup.low, mode.speedup.high)


def _draw_rates(drawing: Element, modes: list[ModeSummary], colours: dict[str, str], top: float) -> None:
    title = f"acceptance rate by depth, temperature {modes[0].temperature:g}"
    add(drawing, "text", {"x": MARGIN, "y": top + 16, "class": "title"}, title)
    drafting = [mode for mode in modes if mode.by_depth]
    deepest = max(len(mode.by_depth) for mode in drafting)
    right, base = WIDTH - _LEGEND, top + TITLE + _RATE_LINES
    across = (right - _LEFT) / max(1, deepest - 1)
    frame = path([(_LEFT, base - _RATE_LINES), (_LEFT, base), (right, base)])
    add(drawing, "path", {"d": frame, "stroke": "#999", "fill": "none"})
    for share in (0.0, 0.5, 1.0):
        add(drawing, "text", {"x": _LEFT - 6, "y": base - share * _RATE_LINES + 4, "class": "last"}, f"{share:g}")
    for depth in range(deepest):
        x = _LEFT + depth * across
        add(drawing, "text", {"x": x, "y": base + 16, "text-anchor": "middle"}, str(depth + 1))
    for index, mode in enumerate(drafting):
        points = [(_LEFT + depth * across, base - rate.rate * _RATE_LINES) for depth, rate in enumerate(mode.by_depth)]
        colour = colours[mode.mode]
        add(drawing, "path", {"d": path(points), "stroke": colour, "stroke-width": 2, "fill": "none"})
        for x, y in points:
            add(drawing, "circle", {"cx": x, "cy": y, "r": 3, "fill": colour})
        y = base - _RATE_LINES + index * 18
        add(drawing, "rect", {"x": right + 16, "y": y - 9, "width": 10, "height": 10, "fill": colour})
        add(drawing, "text", {"x": right + 32, "y": y}, mode.mode)
