"""`spaceport bench load`: throughput and latency of concurrent requests."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench.load import compare_max_requests, load_report, prompt_requests, random_requests
from spaceport.tools.cli.options import PATH, Renamed, bundle_argument, json_option
from spaceport.tools.demo.prompts import prompts_of


@click.command("load")
@bundle_argument
@click.option("--requests", default=16, show_default=True, help="Requests that are sent at the same time.")
@click.option(
    "--max-requests",
    cls=Renamed,
    former=("--places",),
    default="1,2,4,8",
    show_default=True,
    metavar="N,N,…",
    help="Values of max_requests, the number of requests that the engine batches.",
)
@click.option("--context", default=64, show_default=True, help="Mean number of prompt tokens.")
@click.option("--prompts", type=PATH, help="Checkpoint whose prompts.json is used instead of random prompts.")
@click.option("--tokens", default=48, show_default=True, help="Maximum tokens per completion.")
@click.option("--mask-slots", type=int, default=None, metavar="K", help="Maximum mask slots; 0 = no drafts from them.")
@click.option("--rounds", default=3, show_default=True, help="Measured rounds; medians are reported.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads.")
@json_option("the results")
def command(
    bundle: Path,
    requests: int,
    max_requests: str,
    context: int,
    prompts: Path | None,
    tokens: int,
    mask_slots: int | None,
    rounds: int,
    threads: int,
    as_json: bool,
) -> None:
    """Throughput and latency of concurrent requests to BUNDLE."""
    counts = [int(part) if part.isdecimal() else 0 for part in max_requests.split(",")]
    if min(*counts, requests, context, tokens, rounds) < 1:
        raise OptionFault(
            f"--max-requests is {max_requests!r}: expected comma-separated numbers of at least 1, and at least 1 of --requests, "
            "--context, --tokens and --rounds"
        )
    decoding = Decoding(max_tokens=tokens, mask_slots=mask_slots)
    if prompts is None:
        load_requests = random_requests(requests, context, decoding)
    else:
        load_requests = prompt_requests(list(prompts_of(prompts).values()), requests, decoding)
    results = compare_max_requests(bundle, counts, load_requests, threads, context * 2 + tokens, rounds)
    load_report(results, requests, tokens, threads).show(as_json)
