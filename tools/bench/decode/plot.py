"""Plot: a benchmark as an SVG picture: bars for speedup and latency, lines for acceptance rate by depth."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from spaceport.tools.bench.compare.plot import COLOURS, MARGIN, TITLE, WIDTH, Panel, blank, draw_bars
from spaceport.tools.bench.compare.summary import Spread
from spaceport.tools.bench.decode.modes import PLAIN
from spaceport.tools.bench.decode.summary import REPLAY_LABEL, DecodeReport, ModeSummary
from spaceport.tools.report.drawing import Element, add, path

_LINES, _LEFT, _LEGEND = 180.0, 60.0, 200.0  # pixels


def plot_of(report: DecodeReport) -> str:
    """The picture as SVG text."""
    names = dict.fromkeys(mode.mode for mode in report.modes)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    panels = list(_panels(report, colours))
    drafting = [modes for modes in _by_temperature(report) if any(mode.by_depth for mode in modes)]
    lines = _LINES + TITLE + 3 * MARGIN
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


def _by_temperature(report: DecodeReport) -> Iterator[list[ModeSummary]]:
    for temperature in report.options.temperatures:
        yield [mode for mode in report.modes if mode.temperature == temperature]


def _panels(report: DecodeReport, colours: dict[str, str]) -> Iterator[Panel]:
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
    right, base = WIDTH - _LEGEND, top + TITLE + _LINES
    across = (right - _LEFT) / max(1, deepest - 1)
    frame = path([(_LEFT, base - _LINES), (_LEFT, base), (right, base)])
    add(drawing, "path", {"d": frame, "stroke": "#999", "fill": "none"})
    for share in (0.0, 0.5, 1.0):
        add(drawing, "text", {"x": _LEFT - 6, "y": base - share * _LINES + 4, "class": "last"}, f"{share:g}")
    for depth in range(deepest):
        x = _LEFT + depth * across
        add(drawing, "text", {"x": x, "y": base + 16, "text-anchor": "middle"}, str(depth + 1))
    for index, mode in enumerate(drafting):
        points = [(_LEFT + depth * across, base - rate.rate * _LINES) for depth, rate in enumerate(mode.by_depth)]
        colour = colours[mode.mode]
        add(drawing, "path", {"d": path(points), "stroke": colour, "stroke-width": 2, "fill": "none"})
        for x, y in points:
            add(drawing, "circle", {"cx": x, "cy": y, "r": 3, "fill": colour})
        y = base - _LINES + index * 18
        add(drawing, "rect", {"x": right + 16, "y": y - 9, "width": 10, "height": 10, "fill": colour})
        add(drawing, "text", {"x": right + 32, "y": y}, mode.mode)
