"""`spaceport distill`: generate a model's own answers to prompts, as training data."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import click

from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    backend_option,
    bundle_argument,
    json_option,
    overwrite_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.distill import (
    DEFAULT_REQUESTS,
    DistillOptions,
    DistillProgress,
    DistillReport,
    open_distillation,
    partial_file,
)
from spaceport.tools.terminal.screen import duration, show_json, show_notes, show_table, stages

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


class Distill(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {"max_tokens": "Answers", "backend": "Backend", "overwrite": "Output"}


@click.command("distill", cls=Distill)
@bundle_argument
@click.argument("prompts", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--max-tokens",
    default=DistillOptions.max_tokens,
    show_default=True,
    metavar="N",
    help="Maximum number of tokens of an answer.",
)
@click.option(
    "--temperature",
    default=DistillOptions.temperature,
    show_default=True,
    metavar="T",
    help="Sampling temperature; 0 = greedy answers.",
)
@click.option(
    "--max-requests",
    type=int,
    metavar="N",
    help=f"Answers that are generated at the same time; default: {DEFAULT_REQUESTS}, or the maximum of the bundle's engines.",
)
@click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens (prompt and answers).")
@backend_option
@threads_option
@trust_engines_option
@overwrite_option("output")
@json_option("the report")
def command(bundle: Path, prompts: Path, out: Path, as_json: bool, **given: Any) -> None:
    """Answer the prompts in PROMPTS with the model's own answers, greedy or sampled, and write them to OUT for
    `spaceport tune`.

    A line of PROMPTS has "messages" (user turns without an answer are answered in order; an answer at the end is
    replaced) or a "prompt"; a .txt file has one prompt per line. While the command runs, OUT.partial stores the answers;
    an interrupted run continues with the same command.
    """
    options = DistillOptions(**given)
    try:
        with ExitStack() as stack:
            with stages() as stage:
                distillation = stack.enter_context(open_distillation(bundle, prompts, out, options, stage))
            show_notes(distillation.runtime.notes)
            with progress_shown() as on_progress:
                report = distillation.run(on_progress)
    except KeyboardInterrupt:
        if partial_file(out).exists():
            click.echo(f"\n{partial_file(out)} has the answers so far: the same command continues the run", err=True)
        raise
    if as_json:
        show_json(report.as_dict())
    else:
        show_report(report)
