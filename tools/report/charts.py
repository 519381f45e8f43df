"""Charts: tokens, KV slots and time of each step of a generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.runtime.trace.record import Record
from spaceport.tools.report.drawing import Element, add, path, picture
from spaceport.tools.report.numbers import slots_in_one_thread, statistics_of
from spaceport.tools.report.scale import LABELS, Scale
from spaceport.tools.report.words import counted, number

_PLOT = 110.0  # pixels
_TOP, _BOTTOM = 14.0, 22.0
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_OUTLIER = 2.0  # times the 95th percentile: longer bars are cut, so that the others stay readable


@dataclass(frozen=True)
class Chart:
    """A drawing with its title, legend and note."""

    title: str
    legend: tuple[tuple[str, str], ...]  # CSS class and meaning
    drawing: Element
    note: str = ""


@dataclass(frozen=True)
class _Axes:
    """The axes of a chart: steps to the right, amounts from 0 upward."""

    scale: Scale
    every: float  # amount between two grid lines
    lines: int  # grid lines above 0

    @property
    def top(self) -> float:
        return self.every * self.lines

    def y(self, amount: float) -> float:
        return _TOP + _PLOT * (1 - min(amount, self.top) / self.top)

    def left(self, step: int) -> float:
        return LABELS + self.scale.left(step)


def charts_of(record: Record, scale: Scale) -> tuple[Chart, ...]:
    """The charts of a page."""
    return (_tokens(record, scale), _slots(record, scale), _seconds(record, scale))


def _tokens(record: Record, scale: Scale) -> Chart:
    drafted = [sum(rows.accepted for rows in step.rows) for step in record.steps]
    others = [sum(rows.generated - rows.accepted for rows in step.rows) for step in record.steps]
    both = [a + b for a, b in zip(drafted, others, strict=True)]
    axes = _axes(scale, max(both, default=0), 1)
    drawing = _frame(axes, "Tokens of each step", "")
    for step, (some, all_) in enumerate(zip(drafted, both, strict=True), 1):
        title = f"step {step}: {counted(all_, 'token')}, {some} of them accepted draft tokens"
        _bars(drawing, axes, step, (("drafted", 0, some), ("network", some, all_)), title)
    mean = statistics_of(record).tokens_per_step
    _across(drawing, axes, mean)
    legend = (
        ("drafted", "accepted draft tokens"),
        ("network", "own tokens of the model"),
        ("mean", f"mean: {mean:.2f} tokens per step"),
    )
    return Chart("Tokens per step", legend, drawing)


def _slots(record: Record, scale: Scale) -> Chart:
    held, line = [step.kv_slots for step in record.steps], slots_in_one_thread(record)
    axes = _axes(scale, max((*held, *line), default=0), 1)
    drawing = _frame(axes, "KV slots of each step", "")
    outline = _stairs(axes, held)
    if outline:
        floor = [(outline[-1][0], axes.y(0)), (outline[0][0], axes.y(0))]
        add(drawing, "path", {"d": f"{path([*outline, *floor])}Z", "class": "area"})
        add(drawing, "path", {"d": path(outline), "class": "held"})
        add(drawing, "path", {"d": path(_stairs(axes, line)), "class": "line"})
    for step, (all_, plain) in enumerate(zip(held, line, strict=True), 1):
        _hit(drawing, axes, step, f"step {step}: {counted(all_, 'KV slot')}, {plain} for the same tokens in one thread")
    legend = (
        ("held", f"in use, including the rows of the step: peak {max(held, default=0)}"),
        ("line", f"the same number of tokens in one thread, without drafts: peak {max(line, default=0)}"),
    )
    return Chart("KV slots", legend, drawing)


def _seconds(record: Record, scale: Scale) -> Chart:
    engine = [step.engine_seconds for step in record.steps]
    both = [step.engine_seconds + step.outside_seconds for step in record.steps]
    most = max(both, default=0.0)
    usual = sorted(both)[int(0.95 * (len(both) - 1))] if both else 0.0
    cut = most > _OUTLIER * usual > 0
    worth, unit = next(((w, u) for w, u in _UNITS if (usual if cut else most) >= w), _UNITS[-1])
    axes = _axes(scale, (usual * 1.2 if cut else most) / worth, 1e-9)
    drawing = _frame(axes, "Time of each step", unit)
    beyond = 0
    for step, (inside, all_) in enumerate(zip(engine, both, strict=True), 1):
        title = f"step {step}: {number(inside / worth)} {unit} in the engine, {number((all_ - inside) / worth)} {unit} outside of it"
        _bars(drawing, axes, step, (("engine", 0, inside / worth), ("outside", inside / worth, all_ / worth)), title)
        if all_ / worth > axes.top:
            beyond += 1
            x, half = axes.left(step) + scale.column / 2, min(5.0, scale.column / 2)
            tip = [(x, _TOP - 9), (x - half, _TOP - 2), (x + half, _TOP - 2)]
            add(drawing, "path", {"d": f"{path(tip)}Z", "class": "beyond"})
    legend = (("engine", "engine call"), ("outside", "outside of the engine (planning, sampling, text)"))
    note = f"▲ {beyond} longer than the axis, at most {number(most / worth)} {unit}" if beyond else ""
    return Chart("Time per step", legend, drawing, note)


def _frame(axes: _Axes, label: str, unit: str) -> Element:
    """An empty chart with grid lines, amounts and step numbers."""
    drawing = picture(LABELS + axes.scale.width, _TOP + _PLOT + _BOTTOM, label)
    right = LABELS + axes.scale.steps * axes.scale.column
    for amount in (axes.every * count for count in range(axes.lines + 1)):
        y = axes.y(amount)
        add(drawing, "line", {"x1": LABELS, "x2": right, "y1": y, "y2": y, "class": "grid"})
        add(drawing, "text", {"x": LABELS - 8, "y": y + 4, "class": "axis last"}, f"{amount:g} {unit}".strip())
    for step in axes.scale.ticks:
        x = LABELS + axes.scale.middle(step)
        add(drawing, "text", {"x": x, "y": _TOP + _PLOT + 15, "class": "axis"}, str(step))
    return drawing


def _bars(drawing: Element, axes: _Axes, step: int, parts: Sequence[tuple[str, float, float]], title: str) -> None:
    """Add the stacked bar of a step; each part runs from one amount to another."""
    group, gap = _hit(drawing, axes, step, title), min(5.0, axes.scale.column / 4)
    for kind, begin, end in parts:
        top, bottom = axes.y(end), axes.y(begin)
        if bottom > top:
            box = {"x": axes.left(step) + gap, "width": axes.scale.column - gap, "y": top, "height": bottom - top}
            add(group, "rect", {**box, "class": kind})


def _hit(drawing: Element, axes: _Axes, step: int, title: str) -> Element:
    """Add the hover area of a step, whose tooltip has its numbers."""
    group = add(drawing, "g", {"class": "column"})
    add(group, "title", text=title)
    box = {"x": axes.left(step), "width": axes.scale.column, "y": _TOP, "height": _PLOT}
    add(group, "rect", {**box, "class": "hit"})
    return group


def _across(drawing: Element, axes: _Axes, amount: float) -> None:
    ends = LABELS, LABELS + axes.scale.steps * axes.scale.column
    add(drawing, "path", {"d": path([(x, axes.y(amount)) for x in ends]), "class": "mean"})


def _stairs(axes: _Axes, amounts: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a step line."""
    found = []
    for step, amount in enumerate(amounts, 1):
        found += [(axes.left(step), axes.y(amount)), (axes.left(step + 1), axes.y(amount))]
    return found


def _axes(scale: Scale, most: float, least: float) -> _Axes:
    """Axes up to `most`, with at most four grid lines at round amounts of at least `least`."""
    every = _round_up(max(most / 4, least)) if most else 1.0
    return _Axes(scale, every, max(1, math.ceil(most / every - 1e-9)))


def _round_up(amount: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(amount))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= amount * (1 - 1e-9))
