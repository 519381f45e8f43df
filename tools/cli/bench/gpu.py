"""`spaceport bench gpu`: build, check, audit and time everything on this machine's GPU."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import click

from spaceport.runtime.backends.machine import no_gpu
from spaceport.tools.bench.checkpoint import SHAPES, make_checkpoint
from spaceport.tools.bench.gpu import (
    CommandResult,
    GpuBenchOptions,
    GpuResults,
    checks,
    machine_rows,
    measure_model,
)
from spaceport.tools.cli import ACCURACY, MISSING, OK, run
from spaceport.tools.cli.options import PATH
from spaceport.tools.demo.prompts import MODEL


@click.command("gpu")
@click.argument("out", type=PATH)
@click.option(
    "--shapes", default="1b,7b", show_default=True, metavar="NAME,…", help=f"Model sizes among {', '.join(SHAPES)}."
)
@click.option(
    "--work", type=PATH, default=Path("gpu-bench"), show_default=True, help="Folder for checkpoints and bundles."
)
@click.option("--rounds", default=30, show_default=True, help="Measurements of each step; medians are reported.")
def command(out: Path, shapes: str, work: Path, rounds: int) -> int:
    """Build, check, audit and time everything that runs on this machine's GPU; write the tables to OUT."""
    if (reason := no_gpu()) is not None:
        on_progress(f"skipped: {reason}")
        return MISSING
    wanted = shapes.split(",")
    if unknown := [name for name in wanted if name not in SHAPES]:
        raise click.UsageError(f"--shapes names {unknown[0]!r}: expected names among {', '.join(SHAPES)}")
    work.mkdir(parents=True, exist_ok=True)
    options = GpuBenchOptions(work, rounds=rounds)
    results = GpuResults(machine_rows(), context=options.context)
    results.checks = checks(options, MODEL, run_command, on_progress)
    out.write_text(results.report().markdown(), "utf-8")
    for name in wanted:
        checkpoint = work / name
        if not (checkpoint / "config.json").exists():
            on_progress(f"creating {name}")
            make_checkpoint(checkpoint, name, dtype=options.dtype)
        results.models.append(measure_model(options, checkpoint, run_command, on_progress))
        out.write_text(results.report().markdown(), "utf-8")  # after each model, in case a later one is interrupted
    return OK


def run_command(arguments: list[str]) -> CommandResult:
    """The result of a `spaceport` command with --json."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*arguments, "--json"])
    lines = err.getvalue().strip().splitlines()
    answer = json.loads(out.getvalue() or "null") if code in (OK, ACCURACY) else None
    return CommandResult(code, answer, lines[-1] if lines else "")


def on_progress(message: str) -> None:
    """Write a line to stderr."""
    click.echo(message, err=True)
