"""`spaceport bench compare`: one checkpoint in Spaceport and in other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.compare import (
    CompareOptions,
    CompareWorkload,
    compare_runtimes,
    comparison_plot,
    comparison_report,
)
from spaceport.tools.bench.rivals import PEERS, peers_named
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import PATH, Sectioned, json_option
from spaceport.tools.report.files import check_target, write_text
from spaceport.tools.terminal.screen import stages

_DEFAULTS = CompareWorkload()
_ROWS = ",".join(str(rows) for rows in _DEFAULTS.rows)


class CompareBenchmark(Sectioned):
    """The command with its options in groups."""

    headings = {"bundles": "Runtimes", "threads": "Workload", "plot": "Output"}  # noqa: RUF012


@click.command("compare", cls=CompareBenchmark)
@click.argument("checkpoint", type=PATH)
@click.option("--work", type=PATH, required=True, help="Folder for environments and converted models.")
@click.option(
    "--setup", is_flag=True, help="Create missing environments and models first; downloads packages with pip."
)
@click.option(
    "--bundle",
    "bundles",
    type=PATH,
    multiple=True,
    help="Bundle of CHECKPOINT; repeatable. Default: those that --setup exported.",
)
@click.option(
    "--peers",
    default=",".join(dict.fromkeys(p.environment for p in PEERS)),
    metavar="NAME,…",
    help="Runtimes to compare, comma-separated.",
)
@click.option("--gguf", type=PATH, metavar="FILE", help="The same model as a GGUF file, for llama.cpp.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads of each runtime.")
@click.option(
    "--rounds", default=5, show_default=True, metavar="N", help="Measured rounds after a warm-up; medians are reported."
)
@click.option(
    "--context",
    default=_DEFAULTS.context,
    show_default=True,
    metavar="N",
    help="Cached tokens before each measured step.",
)
@click.option("--tokens", default=_DEFAULTS.tokens, show_default=True, metavar="N", help="Decode steps per round.")
@click.option("--rows", default=_ROWS, show_default=True, metavar="N,N,…", help="Rows per step to measure.")
@click.option(
    "--prefill", default=_DEFAULTS.prefill, show_default=True, metavar="N", help="Prompt tokens of the prefill."
)
@click.option("--requests", default=_DEFAULTS.requests, show_default=True, metavar="N", help="Concurrent requests.")
@click.option(
    "--request-context",
    default=_DEFAULTS.request_context,
    show_default=True,
    metavar="N",
    help="Prompt tokens per concurrent request.",
)
@click.option(
    "--request-tokens",
    default=_DEFAULTS.request_tokens,
    show_default=True,
    metavar="N",
    help="New tokens per concurrent request.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the random prompts.")
@click.option("--plot", type=PATH, metavar="FILE", help="Write an SVG plot to FILE.")
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE.")
@json_option("the report")
def command(checkpoint: Path, as_json: bool, **values: Any) -> None:
    """Compare the speed and memory of CHECKPOINT in Spaceport and in other runtimes.

    Each runtime has its own environment and process; one process computes at a time. Only --setup downloads packages: a
    runtime that is missing in the work folder is skipped, with a note on what to do.
    """
    plot, markdown = values.pop("plot"), values.pop("markdown")
    options = options_of(checkpoint, values)
    for target in (plot, markdown):
        if target is not None:
            check_target(target)
    with stages() as on_progress:
        comparison = compare_runtimes(options, on_progress)
    if plot is not None:
        write_text(plot, comparison_plot(comparison))
    comparison_report(comparison).show(as_json, markdown)


def options_of(checkpoint: Path, values: dict[str, Any]) -> CompareOptions:
    """The options of the comparison from the command's parameters."""
    threads, rounds = values["threads"], values["rounds"]
    if min(threads, rounds) < 1:
        raise OptionFault(f"--threads is {threads} and --rounds {rounds}: expected at least 1 of each")
    lengths = ("context", "tokens", "prefill", "requests", "request_context", "request_tokens", "seed")
    workload = CompareWorkload(rows=parse_counts("--rows", values["rows"]), **{name: values[name] for name in lengths})
    others = {name: values[name] for name in ("work", "bundles", "gguf", "threads", "rounds", "setup")}
    return CompareOptions(checkpoint, peers=peers_named(values["peers"]), workload=workload, **others)
