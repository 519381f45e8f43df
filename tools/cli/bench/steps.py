"""`spaceport bench steps`: time per step by number of rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.steps import loop_cost, step_costs
from spaceport.tools.cli.options import backend_option, bundle_argument, json_option, threads_option
from spaceport.tools.terminal.screen import show_json, show_notes, show_table


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
    counts = parse_rows(rows)
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
    if as_json:
        show_json(
            {
                "context": context,
                "threads": threads,
                "steps": [asdict(c) for c in costs],
                "loop": [asdict(c) for c in loops],
            }
        )
        return
    show_table(
        f"Steps after {context} tokens", ("rows", "ms", "ratio"), [(c.rows, c.milliseconds, c.ratio) for c in costs]
    )
    columns = ("mask slots", "steps", "ms in the engine", "ms outside")
    table = [(c.mask_slots, c.steps, c.engine_milliseconds, f"{c.outside_milliseconds:.3f}") for c in loops]
    show_table("\nDecoding, per step", columns, table)


def parse_rows(text: str) -> list[int]:
    """The numbers of rows in a text such as `1,2,4`."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionFault(f"--rows is {text!r}: expected comma-separated numbers, such as 1,9,36") from None
    if not counts or min(counts) < 1:
        raise OptionFault(f"--rows is {text!r}: expected numbers of at least 1")
    return counts
