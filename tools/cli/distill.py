"""`spaceport distill`: generate a model's own answers to prompts, as training data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    backend_option,
    bundle_argument,
    declared_options,
    json_option,
    max_seq_len_option,
    overwrite_option,
    sections,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json
from spaceport.training.distill import DistillOptions, distill, partial_file


@sections({"max_tokens": "Answers", "backend": "Backend", "overwrite": "Output"})
@click.command("distill", cls=Sectioned)
@bundle_argument
@click.argument("prompts", type=PATH)
@click.argument("out", type=PATH)
@declared_options(DistillOptions, defaults=True)
@max_seq_len_option
@backend_option
@threads_option
@trust_engines_option
@overwrite_option("output")
@json_option("the report")
def command(bundle: Path, prompts: Path, out: Path, as_json: bool, **given: Any) -> None:
    """Answer the prompts in PROMPTS with the model's own answers, greedy or sampled, and write them to OUT for
    `spaceport tune`.

    A line of PROMPTS has "messages" (user turns without an answer are answered in order; an answer at the end is
    replaced) or a "prompt"; a .txt file has one prompt per line. While the command runs, OUT.partial stores the
    conversations; an interrupted run continues with the same command.
    """
    try:
        report = distill(bundle, prompts, out, DistillOptions(**given), lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        if partial_file(out).exists():
            click.echo(f"\n{partial_file(out)} has the answers so far: the same command continues the run", err=True)
        raise
    if as_json:
        show_json(asdict(report))
        return
    rate = report.tokens / report.seconds if report.seconds else 0.0
    click.echo(
        f"{out}: {report.conversations} conversations from {report.prompts} prompts, {report.unfinished} at a limit "
        f'("ends": false); {report.tokens:,} tokens in {report.seconds:,.1f} s, {rate:,.0f} tokens/s'
    )
