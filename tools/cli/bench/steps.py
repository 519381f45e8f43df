"""`spaceport bench steps`: time per step by number of rows."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.random_weights import CONFIG_FILE, inflate, is_skeleton
from spaceport.tools.bench.steps import Budget, EngineSteps, StepOptions, measure_backend, steps_report
from spaceport.tools.cli.bench import parse_counts, parse_numbers
from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    bundle_argument,
    json_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.report.files import check_target, write_text
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
@click.option(
    "--replay",
    metavar="P,P,…",
    help="Also decode synthetic text with this acceptance rate by depth, plain and drafted.",
)
@click.option(
    "--transformers", is_flag=True, help="Also time plain decoding of transformers; for a folder of `bench random`."
)
@click.option("--budget", type=DURATION, metavar="TIME", help="Begin no further figure after this time, such as 4m.")
@click.option("--save", type=PATH, metavar="FILE", help="Rewrite FILE as JSON after each figure.")
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
    replay: str | None,
    transformers: bool,
    budget: float | None,
    save: Path | None,
    threads: int,
    trust_engines: bool,
    as_json: bool,
) -> None:
    """Median time per step of BUNDLE by number of rows, and the time outside the engine during decoding.

    BUNDLE may be a folder that `spaceport bench random` wrote: its weights are then drawn at random."""
    accepted = None if replay is None else parse_numbers("--replay", replay, 0, 1)
    counts, seconds = parse_counts("--rows", rows), float("inf") if budget is None else budget
    options = StepOptions(counts, context, rounds, threads, trust_engines, without_graphs, accepted, seconds)
    left = Budget(seconds)
    random = is_skeleton(bundle)
    if transformers and not random:
        raise OptionFault(f"--transformers with {bundle}: expected a folder that `spaceport bench random` wrote")
    if save is not None:
        check_target(save)
    measured: list[EngineSteps] = []
    times: dict[str, float] = {}

    def report() -> None:
        if save is not None:
            write_text(save, json.dumps(steps_report(measured, options, times).data))

    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / bundle.absolute().name if random else bundle
        if random:
            inflate(bundle, folder)
        opened = open_bundle(folder)
        for name in dict.fromkeys(backends):
            measure_backend(opened, name, options, left, measured, report)
    if transformers and left.left > 0:
        from spaceport.tools.bench.on_transformers import decoding_times

        dtype = opened.manifest.signature.dtype
        for name, milliseconds in decoding_times(bundle / CONFIG_FILE, dtype, context, rounds):
            times[name] = milliseconds
            report()
    show_notes(list(dict.fromkeys(note for steps in measured for note in steps.notes)))
    steps_report(measured, options, times).show(as_json)
