"""`spaceport bench decode`: whether drafts pay on given prompts."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.decode.benchmark import benchmark
from spaceport.tools.bench.decode.modes import MODES, parse_modes
from spaceport.tools.bench.decode.options import REPLAYED, DecodeOptions, parse_counts, parse_numbers
from spaceport.tools.bench.decode.plot import plot_of
from spaceport.tools.bench.decode.report import markdown_of
from spaceport.tools.cli.exit_codes import ACCURACY, OK
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    backend_option,
    bundle_argument,
    json_option,
    refuse_unused,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.report.files import check_target, write_text
from spaceport.tools.terminal.screen import show_json, stages


class Decode(Sectioned):
    """The command with its options under headings."""

    headings = {"max_tokens": "What is decoded", "replay": "Replay", "backend": "Engine", "markdown": "Output"}  # noqa: RUF012


@click.command("decode", cls=Decode)
@bundle_argument
@click.argument("prompts", type=PATH, required=False)
@click.option(
    "--max-tokens", default=DecodeOptions.max_tokens, show_default=True, metavar="N", help="Tokens of each text."
)
@click.option("--limit", type=int, metavar="N", help=f"Only the first N prompts; of a replay: {REPLAYED}.")
@click.option(
    "--temperatures", default="0", show_default=True, metavar="T,T,…", help="Sampling temperatures; 0 = greedy."
)
@click.option("--modes", metavar="NAME,…", help=f"Of {', '.join(MODES)}; default: all that the bundle has.")
@click.option("--fixed", metavar="K,K,…", help="Also chains of K mask slots in every step.")
@click.option("--requests", default=1, show_default=True, metavar="N", help="Concurrent requests.")
@click.option(
    "--rounds", default=DecodeOptions.rounds, show_default=True, metavar="N", help="Rounds behind the warm-up."
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of sampling, of intervals and of a replay."
)
@click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens.")
@click.option(
    "--replay",
    metavar="P,P,…",
    help="Real steps with made-up text: acceptance probability by depth, each behind an accepted token.",
)
@click.option(
    "--context", default=DecodeOptions.context, show_default=True, metavar="N", help="Prompt tokens of a replay."
)
@backend_option
@threads_option
@trust_engines_option
@click.option("--markdown", type=PATH, metavar="FILE", help="Write the tables there as well.")
@click.option("--plot", type=PATH, metavar="FILE", help="Write an SVG picture there.")
@json_option("the report")
@click.pass_context
def command(
    click_context: click.Context,
    bundle: Path,
    prompts: Path | None,
    max_tokens: int,
    limit: int | None,
    temperatures: str,
    modes: str | None,
    fixed: str | None,
    requests: int,
    rounds: int,
    seed: int,
    max_seq_len: int | None,
    replay: str | None,
    context: int,
    backend: str,
    threads: int,
    trust_engines: bool,
    markdown: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure whether drafts pay: every way to draft against plain decoding over the file PROMPTS.

    A prompt on each line: plain text, or JSON with "messages", "prompt" or "text". All modes take turns in every round.
    With --replay, acceptance follows a table and PROMPTS only gives the lengths of prompts. Exit code 4 if a drafted text
    is not the plain one.
    """
    if prompts is None and replay is None:
        raise OptionFault("no file of prompts: expected PROMPTS, or --replay with acceptance probabilities")
    given, replays = ("with PROMPTS", "leave PROMPTS out"), ("without --replay", "add --replay")
    refuse_unused(
        click_context,
        [Unused(prompts is not None, ("context",), *given), Unused(replay is None, ("context",), *replays)],
    )
    options = DecodeOptions(
        max_tokens=max_tokens,
        limit=limit,
        temperatures=tuple(dict.fromkeys(parse_numbers("--temperatures", temperatures, 0, 100))),
        modes=None if modes is None else parse_modes(modes),
        fixed=() if fixed is None else parse_counts("--fixed", fixed),
        requests=requests,
        rounds=rounds,
        seed=seed,
        replay=None if replay is None else parse_numbers("--replay", replay, 0, 1),
        context=context,
        backend=backend,
        threads=threads,
        max_seq_len=max_seq_len,
        trust_engines=trust_engines,
    )
    for target in (markdown, plot):
        if target is not None:
            check_target(target)
    with stages() as stage:
        report = benchmark(bundle, prompts, options, stage)
    if markdown is not None:
        write_text(markdown, markdown_of(report))
    if plot is not None:
        write_text(plot, plot_of(report))
    if as_json:
        show_json(report.as_dict())
    else:
        click.echo(markdown_of(report), nl=False)
    return OK if report.identical else ACCURACY
