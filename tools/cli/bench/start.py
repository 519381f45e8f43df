"""`spaceport bench start`: how long a service takes from the start of its process to its first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.start import PageCache, benchmark_start
from spaceport.tools.cli.options import PATH, json_option
from spaceport.tools.terminal.screen import stages


@click.command("start")
@click.argument("bundles", nargs=-1, required=True, type=PATH, metavar="BUNDLE…")
@click.option(
    "--page-cache",
    default="warm,cold",
    show_default=True,
    metavar="warm,cold",
    help="Whether the bundle's files are in memory when the service starts; cold = they are read from their disk.",
)
@click.option("--prompt", default="Name three colours.", show_default=True, metavar="TEXT", help="Text of a request.")
@click.option("--rounds", default=5, show_default=True, metavar="N", help="Starts under each condition.")
@click.option("--threads", default=0, metavar="N", help="CPU threads; 0 = one per core (default).")
@click.option("--max-requests", default=8, show_default=True, metavar="N", help="Requests that decode at a time.")
@click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens.")
@click.option("--copy-weights", is_flag=True, help="Copy the weights into memory.")
@json_option("the report")
def command(
    bundles: tuple[Path, ...],
    page_cache: str,
    prompt: str,
    rounds: int,
    threads: int,
    max_requests: int,
    max_seq_len: int | None,
    copy_weights: bool,
    as_json: bool,
) -> None:
    """Start `spaceport serve` with each BUNDLE several times and report the medians of its phases in seconds.

    Each start is measured with and without stored step costs, which do not touch those of this user.
    """
    flags = ["--threads", str(threads), "--max-requests", str(max_requests)]
    flags += ["--copy-weights"] if copy_weights else []
    flags += [] if max_seq_len is None else ["--max-seq-len", str(max_seq_len)]
    caches = page_caches_of(page_cache)
    with stages() as on_progress:
        report = benchmark_start(bundles, flags, prompt, caches, rounds, on_progress)
    report.show(as_json)


def page_caches_of(given: str) -> Sequence[PageCache]:
    """The states of the page cache in a text such as `warm,cold`."""
    known = {name: name for name in get_args(PageCache)}
    names = given.split(",")
    if not all(name in known for name in names):
        raise OptionFault(f"--page-cache is {given!r}: expected warm, cold or warm,cold")
    return [known[name] for name in dict.fromkeys(names)]
