"""`spaceport bench outside`: what a round takes beside the engine."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import asdict
from pathlib import Path

import click

from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.tools.bench.outside import CASES, LENGTH, measure
from spaceport.tools.cli.options import bundle_argument, json_option
from spaceport.tools.terminal.screen import show_json, show_table


@click.command("outside")
@bundle_argument
@click.option("--real", is_flag=True, help="Run the graph of BUNDLE in every step too.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="Processor threads of the graph.")
@click.option("--rounds", "least", default=150, show_default=True, help="Rounds to measure of each kind, at least.")
@click.option("--profile", "profiled", is_flag=True, help="Tell in which functions the time goes; it is more then.")
@json_option("it")
def command(bundle: Path, real: bool, threads: int, least: int, profiled: bool, as_json: bool) -> None:
    """Time that a round takes beside the engine, by requests and rows, with the sizes and the tokenizer of BUNDLE."""
    opened = open_bundle(bundle)
    capacity = capacity_for(opened.manifest, LENGTH)
    costs = []
    for requests, rows in CASES:
        inner = open_engine(opened, "auto", EngineOptions(capacity, requests, threads)) if real else None
        profile = cProfile.Profile() if profiled else None
        costs.append(measure(opened, inner, requests, rows, least, profile))
        if profile is not None:
            click.echo(f"\n{requests} requests, {rows} rows each:")
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(18)
    if as_json:
        show_json({"real": real, "costs": [asdict(cost) for cost in costs]})
        return
    columns = ("requests", "rows of each", "rounds", "ms, median", "ms, 95 of 100")
    show_table("Outside the engine, per round", columns, [tuple(asdict(cost).values()) for cost in costs])
