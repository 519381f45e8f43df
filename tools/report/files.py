"""Files: reports and traces on disk, written atomically, and the HTML page of a report."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import jinja2
from markupsafe import Markup

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.trace import TraceRecord
from spaceport.serving.page.modules import import_map, style

_JOINERS = "\u200c\u200d"  # needed inside words and emoji
_NO_CHARACTERS = range(0xFDD0, 0xFDF0)
_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def visible(text: str) -> str:
    """Text with invisible and invalid characters replaced by their codes."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    """The character, or its code if it is invisible, changes the direction of text or is invalid."""
    code = ord(character)
    if character in "\n\t" or character in _JOINERS:
        return character
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs")
    if invisible or code in _NO_CHARACTERS or code & 0xFFFE == 0xFFFE:
        return f"⟨{code:02X}⟩"
    return character


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
    """Write a record as JSON, which the page of a service opens."""
    write_text(path, json.dumps(record.as_dict(), separators=(",", ":"), allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    check_target(path)
    try:
        replace_text(path.resolve(), text)  # follows a symbolic link
    except OSError as error:
        raise OptionFault(f"{path}: {error.strerror}: expected a file that can be written") from error
