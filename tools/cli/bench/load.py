"""`spaceport bench load`: throughput and latency under load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench.load import compare, given_requests, random_requests
from spaceport.tools.cli.options import PATH, bundle_argument, json_option
from spaceport.tools.demo.prompts import prompts_of
from spaceport.tools.terminal.screen import show_json, show_table


@click.command("load")
@bundle_argument
@click.option("--requests", default=16, show_default=True, help="Texts that are asked for at once.")
@click.option("--places", default="1,2,4,8", show_default=True, metavar="N,N,…", help="Values of max_requests.")
@click.option("--context", default=64, show_default=True, help="Tokens of a prompt, on average.")
@click.option("--prompts", type=PATH, help="Checkpoint whose prompts.json is asked instead.")
@click.option("--tokens", default=48, show_default=True, help="Most tokens of a text.")
@click.option("--mask-slots", type=int, default=None, metavar="K", help="Most tokens to draft; 0: none.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True, metavar="N", help="Processor threads.")
@json_option("it")
def command(
    bundle: Path,
    requests: int,
    places: str,
    context: int,
    prompts: Path | None,
    tokens: int,
    mask_slots: int | None,
    rounds: int,
    threads: int,
    as_json: bool,
) -> None:
    """Throughput and latency of BUNDLE under load."""
    counts = [int(part) if part.isdecimal() else 0 for part in places.split(",")]
    if min(*counts, requests, context, tokens, rounds) < 1:
        raise OptionFault(f"--places is {places!r}: expected numbers of at least 1, as of the other options")
    decoding = Decoding(max_tokens=tokens, mask_slots=mask_slots)
    if prompts is None:
        load_requests = random_requests(requests, context, decoding)
    else:
        load_requests = given_requests(list(prompts_of(prompts).values()), requests, decoding)
    loads = compare(bundle, counts, load_requests, threads, context * 2 + tokens, rounds)
    if as_json:
        show_json(
            {"requests": requests, "tokens": tokens, "threads": threads, "loads": [asdict(load) for load in loads]}
        )
        return
    columns = ("places", "tokens/s", "ratio", "tokens/CPU s", "ratio", "first, p50 s", "p95 s", "whole, p50 s", "p95 s")
    show_table(
        f"{requests} texts at once, {tokens} tokens each", columns, [tuple(asdict(load).values()) for load in loads]
    )
