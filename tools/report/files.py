"""Files: reports and traces on disk, written atomically, and the HTML page of a report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jinja2
from markupsafe import Markup

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.trace import TraceRecord, trace_of
from spaceport.serving.page.modules import import_map, style
from spaceport.tools.report.lanes import visible

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_LARGEST_TRACE = 2**26  # bytes; a step of the demo has 500, and 14 arrays and objects
_MOST_CONTAINERS = 2**20  # arrays and objects, which take twenty times their bytes


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


def check_target(path: Path) -> None:
    """Raise if no file can be written at this path; call it before a generation that takes minutes."""
    if not path.absolute().parent.is_dir():
        raise OptionFault(f"{path}: the folder {path.absolute().parent} does not exist: create it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise OptionFault(f"{path}: the folder {path.absolute().parent} is not writable: choose another folder")
    try:
        other = path.exists() and not path.is_file()
    except OSError as error:
        raise OptionFault(f"{path}: {error.strerror}: expected a file that can be written") from error
    if other:
        raise OptionFault(f"{path}: is not a file: expected the name of a new file or of a file to replace")


def write_report(path: Path, record: TraceRecord, title: str = "Generation") -> None:
    """Write the HTML report of a generation; an existing file is replaced once the report is complete."""
    write_text(path, page_of(record, title))


def write_trace(path: Path, record: TraceRecord) -> None:
    """Write a record as JSON, for `read_trace`."""
    write_text(path, json.dumps(record.as_dict(), separators=(",", ":"), allow_nan=False) + "\n")


def read_trace(path: Path) -> TraceRecord:
    """The validated record in a trace file."""
    try:
        if not path.is_file():
            raise InputFault("no such file: expected a trace written by `spaceport generate --trace`")
        if (size := path.stat().st_size) > _LARGEST_TRACE:
            raise InputFault(f"{size} bytes: expected a trace of at most {_LARGEST_TRACE}")
        text = path.read_text("utf-8")
        if (count := text.count("[") + text.count("{")) > _MOST_CONTAINERS:
            raise InputFault(f"{count} arrays and objects: expected a trace with at most {_MOST_CONTAINERS}")
        return trace_of(json.loads(text))
    except InputFault as fault:
        raise InputFault(f"{path}: {fault}") from fault
    except OSError as error:
        raise InputFault(f"{path}: {error.strerror}: expected a file that can be read") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, too many digits
        raise InputFault(
            f"{path}: {error}: expected a trace in JSON; write it again with `spaceport generate --trace`"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    check_target(path)
    try:
        replace_text(path.resolve(), text)  # follows a symbolic link
    except OSError as error:
        raise OptionFault(f"{path}: {error.strerror}: expected a file that can be written") from error
