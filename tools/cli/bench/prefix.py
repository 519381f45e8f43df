"""`spaceport bench prefix`: the next turn of a chat with and without a prefix cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.prefix import measure
from spaceport.tools.cli.options import backend_option, bundle_argument, json_option, threads_option
from spaceport.tools.terminal.screen import show_json, show_table


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
    results = measure(bundle, lengths, message, rounds, threads, backend)
    if as_json:
        show_json({"threads": threads, "results": [asdict(result) for result in results]})
        return
    columns = (
        "history",
        "reused",
        "first token, ms",
        "with cache, ms",
        "ratio",
        "ratio of CPU time",
        "copy, ms",
        "ratio",
    )
    table = [
        (
            result.history,
            result.reused,
            f"{result.cold_seconds * 1e3:.1f}",
            f"{result.warm_seconds * 1e3:.1f}",
            f"{result.ratio:.3f}",
            f"{result.cpu_ratio:.3f}",
            f"{result.copy_seconds * 1e3:.2f}",
            f"{result.copy_ratio:.4f}",
        )
        for result in results
    ]
    show_table(f"Next turn of a chat with a message of {message} tokens", columns, table)
