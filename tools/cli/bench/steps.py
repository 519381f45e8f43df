"""`spaceport bench steps`: time per step by number of rows."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.steps import loop_cost, step_costs, steps_report
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import backend_option, bundle_argument, json_option, threads_option
from spaceport.tools.terminal.screen import show_notes


@click.command("steps")
@bundle_argument
@click.option("--rows", default="1,2,4,9,16,36", show_default=True, metavar="N,N,…", help="Rows per step to measure.")
@click.option("--context", default=256, show_default=True, help="Cached tokens before each step.")
@click.option("--rounds", default=30, show_default=True, help="Measurements of each width; medians are reported.")
@threads_option
@backend_option
@click.option("--trust-engines", is_flag=True, help="Run engines that were not built on this machine.")
@json_option("the results")
def command(
    bundle: Path, rows: str, context: int, rounds: int, threads: int, backend: str, trust_engines: bool, as_json: bool
) -> None:
    """Median time per step of BUNDLE by number of rows, and the time outside the engine during decoding."""
    counts = parse_counts("--rows", rows)
    if context < 1 or rounds < 1:
        raise OptionFault(f"--context is {context} and --rounds {rounds}: expected at least 1 of each")
    with Runtime.open(bundle, backend=backend, threads=threads, trust_engines=trust_engines) as runtime:
        show_notes(runtime.notes)
        manifest = runtime.bundle.manifest
        most = min(runtime.engine.capacity - context - 1, runtime.engine.rows)
        if max(counts) > most or context + 2 > runtime.max_seq_len:
            raise OptionFault(
                f"{max(counts)} rows after {context} tokens exceed the context length {runtime.max_seq_len}: lower --rows or --context"
            )
        costs = step_costs(runtime.engine, counts, context, rounds)
        drafts = sorted({0, manifest.drafts.max_tokens})
        loops = [loop_cost(runtime, manifest, k, context, rounds) for k in drafts]
    steps_report(costs, loops, context, threads).show(as_json)
