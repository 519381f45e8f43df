"""Page: the report of a generation as HTML that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.trace.record import Record
from spaceport.tools.report.charts import Chart, charts_of
from spaceport.tools.report.drawing import markup
from spaceport.tools.report.keys import LANES, keys
from spaceport.tools.report.lane_drawing import draw_lanes
from spaceport.tools.report.lane_style import COLOURS, MARKS
from spaceport.tools.report.lanes import TraceLane, lanes_of
from spaceport.tools.report.numbers import in_one_line, statistics_of
from spaceport.tools.report.scale import scale_for_charts, scale_for_lanes
from spaceport.tools.report.story import story_of
from spaceport.tools.report.words import counted, number, visible

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Number:
    """One of the numbers at the head of a page."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Share:
    """How many of some candidates were accepted."""

    name: str
    drafted: int
    accepted: int

    @property
    def percent(self) -> int:
        return round(100 * self.accepted / self.drafted)


def page_of(record: Record, title: str) -> str:
    """The HTML of a report."""
    lanes, statistics, steps = lanes_of(record), statistics_of(record), len(record.steps)
    names, drawing = map(markup, draw_lanes(record, lanes, scale_for_lanes(steps))) if steps else ("", "")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        title=visible(title),
        colours=Markup(COLOURS),
        marks=Markup(MARKS),
        prompt=visible(record.prompt_text),
        prompt_tokens=statistics.prompt_tokens,
        numbers=_numbers(record, statistics),
        keys=keys(LANES),
        names=names,
        lanes=drawing,
        charts=[_shown(chart) for chart in charts_of(record, scale_for_charts(steps))] if steps else [],
        drafts=_drafts(statistics),
        story=markup(story_of(record, lanes)),
        threads=[_row(lane) for lane in lanes],
    )


def _numbers(record: Record, statistics: Statistics) -> list[Number]:
    drafted, accepted = sum(statistics.drafted_by_depth), sum(statistics.accepted_by_depth)
    prompt_steps = f"and {counted(statistics.prompt_steps, 'step')} for the prompt" if statistics.prompt_steps else ""
    steps = statistics.steps + statistics.prompt_steps
    seconds = statistics.engine_seconds + statistics.outside_seconds
    waited = f", after waiting for {_seconds(statistics.waiting_seconds)}" if statistics.waiting_seconds else ""
    return [
        Number("Tokens", str(statistics.tokens), f"behind {statistics.prompt_tokens} of the prompt"),
        Number("Steps", str(statistics.steps), prompt_steps),
        Number("Tokens per step", f"{statistics.tokens_per_step:.2f}", "1 in plain decoding"),
        Number("Threads", str(statistics.threads), f"{statistics.peak_threads} at once at most"),
        Number("Accepted drafts", str(accepted), f"of {counted(drafted, 'candidate')}"),
        Number("Rows", str(statistics.rows), f"{statistics.rows / steps:.1f} a step" if steps else ""),
        Number("Most slots held", str(statistics.peak_slots), f"{max(in_one_line(record), default=0)} in one line"),
        Number("Time", _seconds(seconds), f"{number(statistics.tokens / seconds)} tokens a second" if seconds else ""),
        Number(
            "In the engine",
            _seconds(statistics.engine_seconds),
            f"{_percent(statistics.engine_seconds, seconds)}{waited}",
        ),
        Number(
            "Outside of it",
            _seconds(statistics.outside_seconds),
            f"{_seconds(statistics.outside_seconds / steps)} a step" if steps else "",
        ),
    ]


def _shown(chart: Chart) -> Mapping[str, object]:
    return {
        "title": chart.title,
        "legend": keys(chart.legend),
        "note": chart.note,
        "drawing": markup(chart.drawing),
    }


def _drafts(statistics: Statistics) -> list[Mapping[str, object]]:
    """The tables of what was drafted; none if nothing was."""
    by_depth = [
        Share(str(depth), *counts)
        for depth, counts in enumerate(zip(statistics.drafted_by_depth, statistics.accepted_by_depth, strict=True), 1)
    ]
    by_source = [
        Share(source, drafted, statistics.accepted_by_source.get(source, 0))
        for source, drafted in sorted(statistics.drafted_by_source.items())
    ]
    found = (("By place behind the last known token", "place", by_depth), ("By who proposed them", "source", by_source))
    return [{"caption": caption, "head": head, "shares": shares} for caption, head, shares in found if shares]


def _row(lane: TraceLane) -> Sequence[object]:
    steps = [cell.step for cell in lane.cells]
    return (
        lane.name,
        lane.written,
        lane.accepted,
        len(steps),
        f"{lane.written / len(steps):.2f}" if steps else "–",
        steps[0] if steps else "–",
        steps[-1] if steps else "–",
        lane.waits,
        lane.record.ending or "not ended",
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


def _seconds(seconds: float) -> str:
    """A time with three digits."""
    for worth, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= worth:
            return f"{number(seconds / worth)} {unit}"
    return f"{number(seconds / 1e-6)} µs"
