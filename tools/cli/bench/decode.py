"""`spaceport bench decode`: the speedup of drafts over plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.tools.bench.decode import benchmark_decode, decode_report
from spaceport.tools.bench.decode_measuring import MODES, DecodeOptions, parse_modes
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bench import parse_counts, parse_numbers
from spaceport.tools.cli.bundle_cache import bundle_at
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    backend_option,
    bundle_argument,
    json_option,
    max_seq_len_option,
    options,
    sections,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import stages

workload = options(
    click.option(
        "--max-tokens", default=DecodeOptions.max_tokens, show_default=True, metavar="N", help="Tokens per completion."
    ),
    click.option("--limit", type=int, metavar="N", help="Use only the first N prompts."),
    click.option(
        "--temperatures", default="0", show_default=True, metavar="T,T,…", help="Sampling temperatures; 0 = greedy."
    ),
    click.option(
        "--modes", metavar="NAME,…", help=f"Modes among {', '.join(MODES)}; default: all that the bundle supports."
    ),
    click.option("--fixed", metavar="K,K,…", help="Also measure chains of K mask slots in every step."),
    click.option("--requests", default=1, show_default=True, metavar="N", help="Concurrent requests."),
    click.option(
        "--rounds",
        default=DecodeOptions.rounds,
        show_default=True,
        metavar="N",
        help="Measured rounds after a warm-up.",
    ),
    click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of sampling and of intervals."),
    max_seq_len_option,
)


@sections({"max_tokens": "Workload", "backend": "Engine", "as_json": "Output"})
@click.command("decode", cls=Sectioned)
@bundle_argument
@click.argument("prompts", type=PATH)
@workload
@backend_option
@threads_option
@trust_engines_option
@json_option("the report")
def command(bundle: Path, prompts: Path, as_json: bool, **values: Any) -> int:
    """Measure the speedup of drafts: every mode against plain decoding on the prompt file PROMPTS.

    One prompt per line: plain text, or JSON with "messages", "prompt" or "text". The modes alternate within each round.
    Without a terminal, the tables are printed as Markdown. Exit code 4 if a drafted completion differs from the plain one.
    """
    decode_options = options_of(values)
    bundle = bundle_at(bundle)
    with stages() as on_progress:
        results = benchmark_decode(bundle, prompts, decode_options, on_progress)
    decode_report(results).show(as_json)
    return OK if results.identical else ACCURACY


def options_of(values: dict[str, Any]) -> DecodeOptions:
    """The options of the benchmark from the command's parameters."""
    modes, fixed = values["modes"], values["fixed"]
    parsed = {
        "temperatures": tuple(dict.fromkeys(parse_numbers("--temperatures", values["temperatures"], 0, 100))),
        "modes": None if modes is None else parse_modes(modes),
        "fixed": () if fixed is None else parse_counts("--fixed", fixed),
    }
    return DecodeOptions(**{**values, **parsed})
