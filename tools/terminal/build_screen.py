"""Build screen: how far a build is, as a bar on a terminal and a few lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click

_LINES = 4  # of a build in a pipe


class Progress(Protocol):
    """Shows a build from when it begins."""

    def begin(self) -> None: ...

    def hear(self, done: float, phase: str) -> None: ...


@contextmanager
def building(name: str, memory: str) -> Iterator[Progress]:
    """What shows a build on stderr; nothing is shown of an engine that is there already."""
    if not sys.stderr.isatty():
        yield Lines(name, memory)
        return
    bar = Bar(name, memory)
    try:
        yield bar
        bar.hear(1.0, "")
    finally:
        bar.end()


class Lines:
    """A line when the build begins and at each quarter of it."""

    def __init__(self, name: str, memory: str) -> None:
        self._first = f"building with {name}: {memory}"
        self._started = time.perf_counter()
        self._told = 0

    def begin(self) -> None:
        click.echo(self._first, err=True)

    def hear(self, done: float, phase: str) -> None:
        if int(done * _LINES) > self._told:
            self._told = int(done * _LINES)
            click.echo(f"{time.perf_counter() - self._started:6.1f} s  {done:4.0%}  {phase}", err=True)


class Bar:
    """A bar with the phase that runs."""

    def __init__(self, name: str, memory: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._first = f"building with {name}: {memory}"
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        phase = TextColumn("{task.fields[phase]}", markup=False)  # the builder's own words
        self._progress = Progress(*columns, phase, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=1.0, phase="", start=False)

    def begin(self) -> None:
        click.echo(self._first, err=True)
        self._progress.start()
        self._progress.start_task(self._task)

    def hear(self, done: float, phase: str) -> None:
        self._progress.update(self._task, completed=done, phase=phase)

    def end(self) -> None:
        self._progress.stop()
