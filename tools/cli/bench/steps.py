"""`spaceport bench steps`: time per step by number of rows."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.steps import StepOptions, measure_backend, steps_report
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import bundle_argument, json_option, threads_option, trust_engines_option
from spaceport.tools.terminal.screen import show_notes


@click.command("steps")
@bundle_argument
@click.option("--rows", default="1,2,4,9,16,36", show_default=True, metavar="N,N,…", help="Rows per step to measure.")
@click.option("--context", default=StepOptions.context, show_default=True, help="Cached tokens before each step.")
@click.option(
    "--rounds", default=StepOptions.rounds, show_default=True, help="Measurements of each width; medians are reported."
)
@click.option(
    "--backend",
    "backends",
    type=click.Choice(("auto", *BACKENDS)),
    multiple=True,
    default=("auto",),
    metavar="NAME",
    help=f"Backend: {', '.join(BACKENDS)}; repeatable, a row each; auto = the best one available (default).",
)
@click.option("--without-graphs", is_flag=True, help="On a GPU, also time steps without CUDA graphs.")
@threads_option
@trust_engines_option
@json_option("the results")
def command(
    bundle: Path,
    rows: str,
    context: int,
    rounds: int,
    backends: tuple[str, ...],
    without_graphs: bool,
    threads: int,
    trust_engines: bool,
    as_json: bool,
) -> None:
    """Median time per step of BUNDLE by number of rows, and the time outside the engine during decoding."""
    options = StepOptions(parse_counts("--rows", rows), context, rounds, threads, trust_engines, without_graphs)
    opened = open_bundle(bundle)
    measured = [steps for name in dict.fromkeys(backends) for steps in measure_backend(opened, name, options)]
    show_notes(list(dict.fromkeys(note for steps in measured for note in steps.notes)))
    steps_report(measured, options).show(as_json)
