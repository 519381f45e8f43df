"""`spaceport bench decode`: the speedup of drafts over plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.decode import benchmark_decode, decode_report
from spaceport.tools.bench.decode_measuring import MODES, REPLAY_PROMPTS, DecodeOptions, parse_modes
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bench import parse_counts, parse_numbers
from spaceport.tools.cli.bundle_cache import bundle_at
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    backend_option,
    bundle_argument,
    json_option,
    options,
    refuse_unused,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages


class DecodeBenchmark(Sectioned):
    """The command with its options in groups."""

    headings = {"max_tokens": "Workload", "replay": "Replay", "backend": "Engine", "markdown": "Output"}  # noqa: RUF012


workload = options(
    click.option(
        "--max-tokens", default=DecodeOptions.max_tokens, show_default=True, metavar="N", help="Tokens per completion."
    ),
    click.option(
        "--limit", type=int, metavar="N", help=f"Use only the first N prompts; of a replay {REPLAY_PROMPTS} by default."
    ),
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
    click.option(
        "--seed", default=0, show_default=True, metavar="N", help="Seed of sampling, of intervals and of a replay."
    ),
    click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens."),
)

replay_options = options(
    click.option(
        "--replay", metavar="P,P,…", help="Run real steps on synthetic text with this acceptance rate by depth."
    ),
    click.option(
        "--context", default=DecodeOptions.context, show_default=True, metavar="N", help="Prompt tokens of a replay."
    ),
)

output = options(
    click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE."),
    json_option("the report"),
)


@click.command("decode", cls=DecodeBenchmark)
@bundle_argument
@click.argument("prompts", type=PATH, required=False)
@workload
@replay_options
@backend_option
@threads_option
@trust_engines_option
@output
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompts: Path | None, **values: Any) -> int:
    """Measure the speedup of drafts: every mode against plain decoding on the prompt file PROMPTS.

    One prompt per line: plain text, or JSON with "messages", "prompt" or "text". The modes alternate within each round.
    With --replay, acceptance rates come from a table, and PROMPTS only sets the prompt lengths. Exit code 4 if a drafted
    completion differs from the plain one.
    """
    markdown, as_json = values.pop("markdown"), values.pop("as_json")
    check_inputs(context, prompts, values["replay"])
    decode_options = options_of(values)
    if markdown is not None:
        check_target(markdown)
    bundle = bundle_at(bundle)
    with stages() as on_progress:
        results = benchmark_decode(bundle, prompts, decode_options, on_progress)
    decode_report(results).show(as_json, markdown)
    return OK if results.identical else ACCURACY


def check_inputs(context: click.Context, prompts: Path | None, replay: str | None) -> None:
    """Raise if there is nothing to measure, or if --context would have no effect."""
    if prompts is None and replay is None:
        raise OptionFault("no prompt file: expected PROMPTS, or --replay with acceptance rates")
    refuse_unused(
        context,
        [
            Unused(prompts is not None, ("context",), "with PROMPTS", "leave PROMPTS out"),
            Unused(replay is None, ("context",), "without --replay", "add --replay"),
        ],
    )


def options_of(values: dict[str, Any]) -> DecodeOptions:
    """The options of the benchmark from the command's parameters."""
    modes, fixed, replay = values["modes"], values["fixed"], values["replay"]
    parsed = {
        "temperatures": tuple(dict.fromkeys(parse_numbers("--temperatures", values["temperatures"], 0, 100))),
        "modes": None if modes is None else parse_modes(modes),
        "fixed": () if fixed is None else parse_counts("--fixed", fixed),
        "replay": None if replay is None else parse_numbers("--replay", replay, 0, 1),
    }
    return DecodeOptions(**{**values, **parsed})
