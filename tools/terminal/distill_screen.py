"""Distill screen: the progress of generated answers as a bar on a terminal, as lines elsewhere, and the final table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from spaceport.tools.distill.distillation import DistillProgress, DistillReport
from spaceport.tools.terminal.screen import duration, show_table

_SECONDS = 10.0  # between two progress lines

OnProgress = Callable[[DistillProgress], None]


@contextmanager
def progress_shown() -> Iterator[OnProgress]:
    """A callback that shows progress on stderr."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    line = TextColumn("{task.description}", markup=False)
    with Progress(BarColumn(24), MofNCompleteColumn(), line, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def show(progress: DistillProgress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=described(progress))

        yield show


def described(progress: DistillProgress) -> str:
    """Tokens, their rate and the expected end."""
    parts = [f"{progress.tokens:,} tokens", f"{progress.tokens_per_second:,.0f} tokens/s"]
    if progress.done < progress.total and (seconds := progress.remaining_seconds) is not None:
        parts.append(f"{duration(seconds)} left")
    return "  ".join(parts)


def show_report(report: DistillReport) -> None:
    """Print the counts of the answers and the rate."""
    rows = [
        ("finished", report.answers["finished"]),
        ('at a limit ("ends": false)', report.answers["unfinished"]),
        ("dropped: empty", report.answers["empty"]),
        ("dropped: prompt too long", report.answers["long prompt"]),
        ("tokens", report.tokens),
    ]
    show_table(f"{report.file}: {report.lines} of {report.prompts} prompts", ("answers", "count"), rows)
    progress = report.progress
    if progress.tokens:
        click.echo(
            f"this run: {progress.tokens:,} tokens in {progress.seconds:,.1f} s, "
            f"{progress.tokens_per_second:,.0f} tokens/s"
        )


def _lines() -> OnProgress:
    """Progress as lines, at most one every ten seconds."""
    last = time.perf_counter()

    def show(progress: DistillProgress) -> None:
        nonlocal last
        now = time.perf_counter()
        resumes = progress.stored and not progress.tokens
        if resumes or now - last >= _SECONDS:
            last = now
            click.echo(f"{progress.done}/{progress.total} prompts  {described(progress)}", err=True)

    return show
