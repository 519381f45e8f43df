"""Tables: a benchmark's result as tables on the terminal and in a file, or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.tools.report.files import write_text
from spaceport.tools.terminal.screen import show_json


def show_tables(tables: str, data: dict[str, Any], as_json: bool, file: Path | None) -> None:
    """Print the tables, or the data as JSON; with a file, the tables are also written to it."""
    if file is not None:
        write_text(file, tables)
    if as_json:
        show_json(data)
    else:
        click.echo(tables, nl=False)
