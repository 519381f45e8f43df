"""Build screen: progress of an engine build, as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click

_LINES = 4  # progress lines per build


class Progress(Protocol):
    """Shows the progress of a build."""

    def begin(self) -> None: ...

    def update(self, done: float, phase: str) -> None: ...


@contextmanager
def building(name: str, memory: str) -> Iterator[Progress]:
    """Progress on stderr, from the start of the build: nothing is shown for an engine that exists already."""
    if not sys.stderr.isatty():
        yield Lines(name, memory)
        return
    bar = Bar(name, memory)
    try:
        yield bar
        bar.update(1.0, "")
    finally:
        bar.end()


class Lines:
    """A line at the start of the build and after each quarter of it."""

    def __init__(self, name: str, memory: str) -> None:
        self._first = f"building with {name}: {memory}"
        self._started = time.perf_counter()
        self._printed = 0

    def begin(self) -> None:
        click.echo(self._first, err=True)

    def update(self, done: float, phase: str) -> None:
        if int(done * _LINES) > self._printed:
            self._printed = int(done * _LINES)
            click.echo(f"{time.perf_counter() - self._started:6.1f} s  {done:4.0%}  {phase}", err=True)


class Bar:
    """A progress bar with the name of the current phase."""

    def __init__(self, name: str, memory: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._first = f"building with {name}: {memory}"
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        phase = TextColumn("{task.fields[phase]}", markup=False)  # as TensorRT names it
        self._progress = Progress(*columns, phase, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=1.0, phase="", start=False)

    def begin(self) -> None:
        click.echo(self._first, err=True)
        self._progress.start()
        self._progress.start_task(self._task)

    def update(self, done: float, phase: str) -> None:
        self._progress.update(self._task, completed=done, phase=phase)

    def end(self) -> None:
        self._progress.stop()
