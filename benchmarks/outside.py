"""`python -m benchmarks outside`: the time per step outside the engine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path

import click

from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import EngineOptions, capacity_for
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.bench.steps import CASES, LENGTH, RoundCost, outside_cost
from spaceport.tools.cli.options import bundle_argument, json_option


@click.command("outside")
@bundle_argument
@click.option("--real", is_flag=True, help="Also run the graph of BUNDLE in every step.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads of the graph.")
@click.option("--rounds", "min_rounds", default=150, show_default=True, help="Steps to measure per case, at least.")
@click.option("--profile", "profiled", is_flag=True, help="Also profile by function; this makes the times longer.")
@json_option("the results")
def command(bundle: Path, real: bool, threads: int, min_rounds: int, profiled: bool, as_json: bool) -> None:
    """Time per step outside the engine, by requests and rows, with the sizes and the tokenizer of BUNDLE."""
    opened = open_bundle(bundle)
    capacity = capacity_for(opened.manifest, LENGTH)
    costs = []
    for requests, rows in CASES:
        inner = open_engine(opened, "auto", EngineOptions(capacity, requests, threads)) if real else None
        profile = cProfile.Profile() if profiled else None
        costs.append(outside_cost(opened, inner, requests, rows, min_rounds, profile))
        if profile is not None:
            click.echo(f"\n{requests} requests, {rows} rows per request:")
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(18)
    outside_report(costs, real).show(as_json)


def outside_report(costs: Sequence[RoundCost], real: bool) -> Report:
    """The time outside the engine by requests and rows as a table."""
    columns = ("requests", "rows per request", "steps", "ms, p50", "ms, p95")
    table = Table("Time outside the engine, per step", columns, [astuple(cost) for cost in costs])
    return Report((), (table,), (), {"real": real, "costs": [asdict(cost) for cost in costs]})
