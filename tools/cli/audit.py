"""`spaceport audit`: whether a bundle's drafted texts are its plain texts."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.tools.cli.exit_codes import ACCURACY, OK
from spaceport.tools.cli.options import (
    PATH,
    backend_option,
    bundle_argument,
    json_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.verify.audit.opened import MOST_REQUESTS, Settings, audit_bundle
from spaceport.tools.verify.audit.report import Finding, Report

_SHOWN = 10  # findings; --json has all


@click.command("audit")
@bundle_argument
@click.argument("prompts", type=PATH)
@backend_option
@click.option("--max-tokens", default=Settings.max_tokens, show_default=True, metavar="N", help="Tokens of each text.")
@click.option("--limit", type=int, metavar="N", help="Read only the first N prompts.")
@click.option("--max-seq-len", type=int, metavar="N", help="Longest prompt and text together.")
@click.option(
    "--max-requests",
    type=int,
    metavar="N",
    help=f"Texts at a time, beside one alone; by default {MOST_REQUESTS}, or as many as the bundle's engines take.",
)
@threads_option
@trust_engines_option
@json_option("the report")
def command(
    bundle: Path,
    prompts: Path,
    backend: str,
    max_tokens: int,
    limit: int | None,
    max_seq_len: int | None,
    max_requests: int | None,
    threads: int,
    trust_engines: bool,
    as_json: bool,
) -> int:
    """Hold every kind of draft against plain decoding over the file PROMPTS, on one engine.

    A prompt on each line: plain text, or JSON with "messages", "prompt" or "text". Exit code 4 if a token differs by more
    than the engine's own rounding explains.
    """
    settings = Settings(max_tokens, limit, max_seq_len, max_requests, threads, trust_engines)
    with stages() as stage:
        report = audit_bundle(bundle, prompts, backend, settings, stage)
    if as_json:
        show_json(report.as_dict())
    else:
        show(report)
    return OK if report.passed else ACCURACY


def show(report: Report) -> None:
    """The noise, the kinds, where they part, and the statement."""
    noise = [
        (one.name, one.places, f"{one.largest:.1e}", f"{one.limit:.1e}", "rounding" if one.sound else "FAULT")
        for one in report.noise
    ]
    show_table(
        f"Noise of other widths and slots, against steps of one row ({report.engine})",
        ("width", "places", "noise", "allowed", "verdict"),
        noise,
    )
    rows = [
        (
            row.kind,
            row.requests,
            row.texts,
            row.tokens,
            row.steps,
            "-" if row.reference else row.identical,
            row.near_ties if row.margin is None else f"{row.near_ties} ({row.margin:.0e})",
            row.faults,
        )
        for row in report.rows
    ]
    columns = ("kind of draft", "at once", "texts", "tokens", "steps", "same", "near-ties", "faults")
    click.echo()
    show_table("Texts, each token held against the logits of a step of one row", columns, rows)
    for finding in sorted(report.findings, key=lambda finding: finding.grade != "FAULT")[:_SHOWN]:
        click.echo(f"\n{told(finding)}")
    if (more := len(report.findings) - _SHOWN) > 0:
        click.echo(f"\n{more} more places: --json lists them")
    click.echo(f"\n{report.statement}")


def told(finding: Finding) -> str:
    """A finding in two lines."""
    miss = finding.miss
    thread = f", thread {'.'.join(map(str, miss.path))}" if miss.path else ""
    kind = finding.kind if finding.requests == 1 else f"{finding.kind}, {finding.requests} at once"
    head = f"{finding.grade}: prompt {finding.prompt} (line {finding.line}), {kind}{thread}"
    if miss.said:
        return f"{head}: {miss.said}"
    place = (
        f"token {miss.place - finding.start + 1}: plain decoding writes {finding.plain!r}, it has {finding.written!r}"
    )
    return f"{head}, {place} (margin {miss.margin:.1e})\n  behind {finding.around!r}"
