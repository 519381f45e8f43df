"""Files: reports and traces on disk, each whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.trace.reader import trace_of
from spaceport.runtime.trace.record import Record
from spaceport.tools.report.page import page_of

_LARGEST_TRACE = 2**30


def check_target(path: Path) -> None:
    """Raise if no file could be written there: to be asked before a generation, which may take minutes."""
    if not path.absolute().parent.is_dir():
        raise OptionFault(f"{path}: there is no folder {path.absolute().parent}: expected one, make it first")
    try:
        other = path.exists() and not path.is_file()
    except OSError as error:
        raise OptionFault(f"{path}: {error.strerror}: expected a file that can be written") from error
    if other:
        raise OptionFault(
            f"{path}: is no file: expected the name of a file, new or to be replaced; add one to the path"
        )


def write_report(path: Path, record: Record, title: str = "Generation") -> None:
    """Write the page of a generation; what stood there is replaced when the page is whole."""
    write_text(path, page_of(record, title))


def write_trace(path: Path, record: Record) -> None:
    """Write a record as JSON, to be read by `read_trace`."""
    write_text(path, json.dumps(record.as_dict(), separators=(",", ":"), allow_nan=False) + "\n")


def read_trace(path: Path) -> Record:
    """The record in a file, checked."""
    try:
        if not path.is_file():
            raise InputFault("no such file: expected a trace")
        if (size := path.stat().st_size) > _LARGEST_TRACE:
            raise InputFault(f"{size} bytes: expected a trace of at most {_LARGEST_TRACE}")
        return trace_of(json.loads(path.read_text("utf-8")))
    except InputFault as fault:
        raise InputFault(f"{path}: {fault}") from fault
    except OSError as error:
        raise InputFault(f"{path}: {error.strerror}: expected a file that can be read") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, too many digits
        raise InputFault(f"{path}: {error}: expected the JSON of a trace; write it again") from error


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    check_target(path)
    try:
        replace_text(path.resolve(), text)  # a link stays one
    except OSError as error:
        raise OptionFault(f"{path}: {error.strerror}: expected a file that can be written") from error
