"""Report: the result of a benchmark, printed on the terminal, as Markdown or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from spaceport.tools.terminal.screen import show_json, show_table


@dataclass(frozen=True)
class Table:
    """A table of a report.

    - `title`: Heading above it; empty: none.
    - `columns`: Headings of the columns; all but the first column are right-aligned.
    - `rows`: Cells by row: text and numbers; None: not measured.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def markdown(self) -> Iterator[str]:
        """Its lines as Markdown."""
        if self.title:
            yield from (f"### {self.title}", "")
        yield _markdown_row(self.columns)
        yield "|---|" + "---:|" * (len(self.columns) - 1)
        for row in self.rows:
            yield _markdown_row([cell_text(value) for value in row])


@dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    - `settings`: Lines that say what was measured on which machine.
    - `tables`: Its tables; those without a row are left out.
    - `conclusions`: Lines of a list below the tables.
    - `data`: Everything that was measured, for JSON.
    """

    settings: Sequence[str]
    tables: Sequence[Table]
    conclusions: Sequence[str]
    data: Mapping[str, Any]

    def markdown(self) -> str:
        """The report as Markdown text."""
        parts: list[Iterable[str]] = [self.settings] if self.settings else []
        parts += [table.markdown() for table in self.tables if table.rows]
        parts += [self.conclusions] if self.conclusions else []
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def show(self, as_json: bool = False) -> None:
        """Print the report, or its data as JSON."""
        if as_json:
            show_json(self.data)
        elif sys.stdout.isatty():
            for line in self.settings:
                click.echo(line)
            for table in self.tables:
                if table.rows:
                    click.echo()
                    show_table(table.title, table.columns, table.rows)
            if self.conclusions:
                click.echo("\n".join(("", *self.conclusions)))
        else:
            click.echo(self.markdown(), nl=False)


def cell_text(value: object) -> str:
    """A cell as text: "-" for what was not measured, and three significant digits, or more of a whole number."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
