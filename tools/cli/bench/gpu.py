"""`spaceport bench gpu`: everything that runs on this machine's GPU, built, checked, audited and timed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import click

from spaceport.runtime.backends.device import no_gpu
from spaceport.tools.bench.checkpoint import SHAPES, make_checkpoint
from spaceport.tools.bench.gpu import CommandResult, GpuBenchOptions, checks, machine, measure_model
from spaceport.tools.bench.gpu_page import GpuPage, markdown
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, MISSING, OK
from spaceport.tools.cli.options import PATH
from spaceport.tools.demo.prompts import MODEL


@click.command("gpu")
@click.argument("out", type=PATH)
@click.option("--shapes", default="1b,7b", show_default=True, metavar="NAME,…", help=f"Of {', '.join(SHAPES)}.")
@click.option("--work", type=PATH, default=Path("gpu-bench"), show_default=True)
@click.option("--rounds", default=30, show_default=True, help="Times that each step is measured.")
def command(out: Path, shapes: str, work: Path, rounds: int) -> int:
    """Build, check, audit and time everything that runs on this machine's GPU; write the tables to OUT."""
    if (reason := no_gpu()) is not None:
        say(f"skipped: {reason}")
        return MISSING
    wanted = shapes.split(",")
    if unknown := [name for name in wanted if name not in SHAPES]:
        raise click.UsageError(f"--shapes names {unknown[0]!r}: expected {', '.join(SHAPES)}")
    work.mkdir(parents=True, exist_ok=True)
    options = GpuBenchOptions(work, rounds=rounds)
    page = GpuPage(machine(), context=options.context)
    page.checks = checks(options, MODEL, run_command, say)
    out.write_text(markdown(page), "utf-8")
    for name in wanted:
        checkpoint = work / name
        if not (checkpoint / "config.json").exists():
            say(f"making {name}")
            make_checkpoint(checkpoint, name, dtype=options.dtype)
        page.models.append(measure_model(options, checkpoint, run_command, say))
        out.write_text(markdown(page), "utf-8")  # after each: a later one may take the machine's time away
    return OK


def run_command(arguments: list[str]) -> CommandResult:
    """Run a command of the command line with --json."""
    out, words = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
        code = run([*arguments, "--json"])
    lines = words.getvalue().strip().splitlines()
    answer = json.loads(out.getvalue() or "null") if code in (OK, ACCURACY) else None
    return CommandResult(code, answer, lines[-1] if lines else "")


def say(what: str) -> None:
    """Write a line to stderr."""
    click.echo(what, err=True)
