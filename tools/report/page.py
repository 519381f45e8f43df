"""Page: the report of a generation as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.trace.record import Record
from spaceport.tools.report.annotated_text import annotated_text
from spaceport.tools.report.charts import Chart, charts_of
from spaceport.tools.report.drawing import markup
from spaceport.tools.report.lane_drawing import draw_lanes
from spaceport.tools.report.lane_style import COLOURS, MARKS
from spaceport.tools.report.lanes import TraceLane, lanes_of
from spaceport.tools.report.legend import LANES, legend
from spaceport.tools.report.numbers import slots_in_one_thread, statistics_of
from spaceport.tools.report.scale import scale_for_charts, scale_for_lanes
from spaceport.tools.report.words import counted, number, visible

_SOURCES = {"mask": "mask slots", "lookup": "prompt lookup", "both": "both"}
_TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Number:
    """A number at the top of the page."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Share:
    """Drafted and accepted tokens of a depth or a source."""

    name: str
    drafted: int
    accepted: int

    @property
    def percent(self) -> int:
        return round(100 * self.accepted / self.drafted)


def page_of(record: Record, title: str) -> str:
    """The HTML page of a record."""
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
        keys=legend(LANES),
        names=names,
        lanes=drawing,
        charts=[_shown(chart) for chart in charts_of(record, scale_for_charts(steps))] if steps else [],
        drafts=_drafts(statistics),
        text=markup(annotated_text(record, lanes)),
        threads=[_row(lane) for lane in lanes],
    )


def _numbers(record: Record, statistics: Statistics) -> list[Number]:
    drafted, accepted = sum(statistics.drafted_by_depth), sum(statistics.accepted_by_depth)
    prompt_steps = f"and {counted(statistics.prompt_steps, 'prefill step')}" if statistics.prompt_steps else ""
    steps = statistics.steps + statistics.prompt_steps
    seconds = statistics.engine_seconds + statistics.outside_seconds
    waited = f", queued for {_seconds(statistics.waiting_seconds)} before" if statistics.waiting_seconds else ""
    return [
        Number(
            "Generated tokens", str(statistics.tokens), f"after {counted(statistics.prompt_tokens, 'prompt token')}"
        ),
        Number("Steps", str(statistics.steps), prompt_steps),
        Number("Tokens per step", f"{statistics.tokens_per_step:.2f}", "plain decoding: 1"),
        Number("Threads", str(statistics.threads), f"at most {statistics.peak_threads} at once"),
        Number(
            "Acceptance rate", _percent(accepted, drafted), f"{accepted} of {counted(drafted, 'draft token')} accepted"
        ),
        Number("Rows", str(statistics.rows), f"{statistics.rows / steps:.1f} per step" if steps else ""),
        Number(
            "Peak KV slots",
            str(statistics.peak_slots),
            f"{max(slots_in_one_thread(record), default=0)} in one thread without drafts",
        ),
        Number("Time", _seconds(seconds), f"{number(statistics.tokens / seconds)} tokens/s" if seconds else ""),
        Number(
            "Engine time",
            _seconds(statistics.engine_seconds),
            f"{_percent(statistics.engine_seconds, seconds)}{waited}",
        ),
        Number(
            "Time outside the engine",
            _seconds(statistics.outside_seconds),
            f"{_seconds(statistics.outside_seconds / steps)} per step" if steps else "",
        ),
    ]


def _shown(chart: Chart) -> Mapping[str, object]:
    return {
        "title": chart.title,
        "legend": legend(chart.legend),
        "note": chart.note,
        "drawing": markup(chart.drawing),
    }


def _drafts(statistics: Statistics) -> list[Mapping[str, object]]:
    """Tables of acceptance rates by depth and by source; none without draft tokens."""
    by_depth = [
        Share(str(depth), *counts)
        for depth, counts in enumerate(zip(statistics.drafted_by_depth, statistics.accepted_by_depth, strict=True), 1)
    ]
    by_source = [
        Share(_SOURCES.get(source, source), drafted, statistics.accepted_by_source.get(source, 0))
        for source, drafted in sorted(statistics.drafted_by_source.items())
    ]
    found = (
        ("By depth (position after the last verified token)", "depth", by_depth),
        ("By source", "source", by_source),
    )
    return [{"caption": caption, "head": head, "shares": shares} for caption, head, shares in found if shares]


def _row(lane: TraceLane) -> Sequence[object]:
    steps = [cell.step for cell in lane.cells]
    return (
        lane.name,
        lane.generated,
        lane.accepted,
        len(steps),
        f"{lane.generated / len(steps):.2f}" if steps else "–",
        steps[0] if steps else "–",
        steps[-1] if steps else "–",
        lane.queued,
        lane.record.ending or "running",
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


def _seconds(seconds: float) -> str:
    """A time with three significant digits."""
    for worth, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= worth:
            return f"{number(seconds / worth)} {unit}"
    return f"{number(seconds / 1e-6)} µs"
