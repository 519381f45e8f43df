"""`spaceport bench compare`: one checkpoint in Spaceport and in other runtimes."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.compare.comparing import CompareOptions, compare
from spaceport.tools.bench.compare.markdown import markdown_of
from spaceport.tools.bench.compare.metrics import Workload
from spaceport.tools.bench.compare.plot import plot_of
from spaceport.tools.bench.compare.subjects import PEERS, chosen
from spaceport.tools.bench.compare.summary import as_json as data_of
from spaceport.tools.cli.bench.steps import parse_rows
from spaceport.tools.cli.options import PATH, Sectioned, json_option
from spaceport.tools.report.files import check_target, write_text
from spaceport.tools.terminal.screen import show_json, stages

_DEFAULTS = Workload()
_ROWS = ",".join(str(rows) for rows in _DEFAULTS.rows)


class Compare(Sectioned):
    """The command with its options under headings."""

    headings = {"bundles": "What is compared", "threads": "What is measured", "plot": "Output"}  # noqa: RUF012


@click.command("compare", cls=Compare)
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
    help="Runtimes to compare, comma-separated.",
)
@click.option("--gguf", type=PATH, help="The same model as a GGUF file, for llama.cpp.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads of each runtime.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds after a warm-up; medians are reported.")
@click.option(
    "--context", default=_DEFAULTS.context, show_default=True, help="Cached tokens before each measured step."
)
@click.option("--tokens", default=_DEFAULTS.tokens, show_default=True, help="Decode steps per round.")
@click.option("--rows", default=_ROWS, show_default=True, metavar="N,N,…", help="Rows per step to measure.")
@click.option("--prefill", default=_DEFAULTS.prefill, show_default=True, help="Prompt tokens of the prefill.")
@click.option("--requests", default=_DEFAULTS.requests, show_default=True, help="Concurrent requests.")
@click.option(
    "--request-context",
    default=_DEFAULTS.request_context,
    show_default=True,
    help="Prompt tokens per concurrent request.",
)
@click.option(
    "--request-tokens", default=_DEFAULTS.request_tokens, show_default=True, help="New tokens per concurrent request."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
@click.option("--plot", type=PATH, metavar="FILE", help="Write an SVG plot to FILE.")
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE.")
@json_option("the report")
def command(
    checkpoint: Path,
    work: Path,
    setup: bool,
    bundles: tuple[Path, ...],
    peers: str,
    gguf: Path | None,
    threads: int,
    rounds: int,
    context: int,
    tokens: int,
    rows: str,
    prefill: int,
    requests: int,
    request_context: int,
    request_tokens: int,
    seed: int,
    plot: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Metric CHECKPOINT in Spaceport and in other runtimes, one process at a time.

    Each runtime runs in an environment of its own, in a process of its own. Nothing is fetched without --setup: a runtime
    that is not in the work folder is listed as absent, with what to do.
    """
    if min(threads, rounds) < 1:
        raise OptionFault(f"--threads is {threads} and --rounds {rounds}: expected at least 1 of each")
    workload = Workload(
        *(context, tokens, tuple(parse_rows(rows)), _DEFAULTS.repeats, prefill),
        *(requests, request_context, request_tokens, seed),
    )
    for target in (plot, markdown):
        if target is not None:
            check_target(target)
    options = CompareOptions(checkpoint, work, bundles, chosen(peers), gguf, workload, threads, rounds, setup)
    with stages() as on_progress:
        found = compare(options, on_progress)
    if plot is not None:
        write_text(plot, plot_of(found))
    if markdown is not None:
        write_text(markdown, markdown_of(found))
    if as_json:
        show_json(data_of(found))
    else:
        click.echo(markdown_of(found), nl=False)
