"""Page: the report of a generation as one self-contained HTML file, whose scripts draw its trace."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from markupsafe import Markup

from spaceport.runtime.trace.record import TraceRecord
from spaceport.serving.page.modules import import_map, style
from spaceport.tools.report.words import visible

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page_of(record: TraceRecord, title: str) -> str:
    """The HTML page of a record."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        title=visible(title),
        style=Markup(style("colours", "marks", "style")),
        modules=Markup(import_map("report_file.js")),
        trace=Markup(_in_script(record)),
    )


def _in_script(record: TraceRecord) -> str:
    """The record as JSON that ends no script element."""
    return json.dumps(record.as_dict(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
