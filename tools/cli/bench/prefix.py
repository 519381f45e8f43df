"""`spaceport bench prefix`: the next turn of a chat with and without a prefix cache."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.prefix import measure_prefixes, prefix_report
from spaceport.tools.cli.options import backend_option, bundle_argument, json_option, threads_option


@click.command("prefix")
@bundle_argument
@click.option(
    "--history", default="250,500,1000,1500", show_default=True, metavar="N,N,…", help="Tokens before the new message."
)
@click.option("--message", default=32, show_default=True, help="Tokens of the new message.")
@click.option("--rounds", default=5, show_default=True, help="Measurements of each length; medians are reported.")
@threads_option
@backend_option
@json_option("the results")
def command(bundle: Path, history: str, message: int, rounds: int, threads: int, backend: str, as_json: bool) -> None:
    """Time to the first token of a chat's next turn in BUNDLE, with and without a prefix cache."""
    lengths = [int(part) if part.isdecimal() else 0 for part in history.split(",")]
    if min(*lengths, message, rounds) < 1:
        raise OptionFault(
            f"--history is {history!r}, --message {message} and --rounds {rounds}: expected numbers of at least 1"
        )
    results = measure_prefixes(bundle, lengths, message, rounds, threads, backend)
    prefix_report(results, message, threads).show(as_json)
