"""Screen: tables, progress and JSON as every command shows them."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from spaceport.exporter.interrupts import interrupts_handled

_SILENCE = 10.0  # seconds after which a stage that still runs is shown again


def show_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    click.echo(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))  # json escapes all below 0x20


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: with lines on a terminal, as aligned text elsewhere; numbers are right-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [all(isinstance(row[i], (int, float)) or row[i] is None for row in rows) for i in range(len(columns))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for column, number in zip(columns, right, strict=True):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        Console(markup=False, emoji=False, highlight=False).print(table)  # rich would read [cpu] as a style
        return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    if title:
        click.echo(title)
    for line in [list(columns), *cells]:
        padded = (
            text.rjust(w) if number else text.ljust(w) for text, w, number in zip(line, widths, right, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def show_notes(notes: Sequence[str]) -> None:
    """Print the notes of a runtime on stderr, one per line."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A callback that shows the current stage on stderr: with its duration on a terminal, else again every 10 seconds."""
    started = time.perf_counter()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
            tasks: list[Any] = []

            def advance(name: str) -> None:
                for task in tasks:
                    progress.update(task, total=1, completed=1)
                    progress.stop_task(task)
                tasks.append(progress.add_task(name, total=None))

            yield advance
            for task in tasks:
                progress.update(task, total=1, completed=1)
        return

    current, shown_at, ended = "", started, threading.Event()

    def show(name: str, again: str = "") -> None:
        nonlocal current, shown_at
        current, shown_at = name, time.perf_counter()
        click.echo(f"{shown_at - started:6.1f} s  {again}{name}", err=True)

    def show_again() -> None:
        while not ended.wait(_SILENCE / 10):
            if current and time.perf_counter() - shown_at >= _SILENCE:
                show(current, "... ")

    repeating = threading.Thread(target=show_again, daemon=True)
    repeating.start()
    try:
        yield show
    finally:
        ended.set()
        repeating.join()


@contextmanager
def interruptible_stages() -> Iterator[Callable[[str], None]]:
    """Like `stages`, and SIGTERM ends the block as Ctrl-C does, so that no temporary files are left."""
    interrupts: list[int] = []

    def interrupt(number: int) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        with interrupts_handled(interrupt), stages() as stage:

            def on_stage(name: str) -> None:
                if interrupts:  # it was lost: Python drops one that arrives in a weak reference callback
                    raise KeyboardInterrupt
                stage(name)

            yield on_stage
    except Exception as error:
        if interrupts:  # torch turns some interrupts into errors of its own
            raise KeyboardInterrupt from error
        raise


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 and value else f"{value:.2f}"
    return printable(str(value))


def printable(text: str) -> str:
    """A text with its control characters escaped: those in a file's entries could change the terminal."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
