"""`spaceport audit`: verify that drafted output equals plain output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bundle_cache import bundle_at
from spaceport.tools.cli.options import (
    PATH,
    BeforeLast,
    Sectioned,
    allow_links_option,
    backend_option,
    declared_options,
    json_option,
    max_seq_len_option,
    sections,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.verify.audit import AuditOptions, AuditReport, GradedMismatch, audit_bundles

_SHOWN = 10  # mismatches; --json has all


@sections({"max_tokens": "Requests", "backend": "Backend", "as_json": "Output"})
@click.command("audit", cls=Sectioned)
@click.argument("bundles", cls=BeforeLast, metavar="BUNDLE...", nargs=-1, required=True, type=PATH)
@click.argument("prompts", type=PATH)
@declared_options(AuditOptions, defaults=True)
@max_seq_len_option
@backend_option
@threads_option
@trust_engines_option
@allow_links_option
@json_option("the report")
def command(bundles: tuple[Path, ...], prompts: Path, as_json: bool, **given: Any) -> int:
    """Verify that the output of every draft mode equals plain decoding for the prompts in PROMPTS, on one backend.

    PROMPTS has one prompt per line: plain text, or JSON with "messages", "prompt" or "text". Draft modes
    are chains, trees, prompt lookup, forks and concurrent requests. The exit code is 4 if a token is not the one that
    plain decoding chooses; near-ties, within the rounding noise of the engine, are counted apart. Several bundles are
    audited one after the other, and compared in one table.
    """
    options = AuditOptions(**given)
    opened = [bundle_at(bundle) for bundle in bundles]
    with stages() as stage:
        reports = audit_bundles(opened, prompts, options, stage)
    passed = all(report.passed for report in reports.values())
    if len(reports) > 1:
        show_several(reports, passed, as_json)
    else:
        (report,) = reports.values()
        if as_json:
            show_json(report.as_dict())
        else:
            show(report)
    return OK if passed else ACCURACY


def show_several(reports: Mapping[Path, AuditReport], passed: bool, as_json: bool) -> None:
    """Print one row for each bundle and the first mismatches of each, or the whole reports as JSON."""
    if as_json:
        models = [{"model": str(bundle), **report.as_dict()} for bundle, report in reports.items()]
        show_json({"passed": passed, "models": models})
        return
    columns = ("model", "method", "drafts", "modes", "tokens", "steps", "per step", "near-ties", "faults", "verdict")
    rows = [_row(bundle, report) for bundle, report in reports.items()]
    show_table("Drafted completions, each token verified by the logits of a step of one row", columns, rows)
    click.echo(
        "modes, tokens, steps: of all drafted modes, requests one at a time and batched. per step: tokens per step with the\n"
        "bundle's default drafts, one greedy request at a time."
    )
    for bundle, report in reports.items():
        if not report.passed:
            click.echo(f"\n{bundle}: {report.summary}")
            show_mismatches(report)


def _row(bundle: Path, report: AuditReport) -> Sequence[object]:
    drafted, default = report.drafted, report.default
    return (
        str(bundle),
        report.method,
        report.drafts,
        len(drafted),
        sum(counts.tokens for counts in drafted),
        sum(counts.steps for counts in drafted),
        default.tokens / default.steps if default.steps else None,
        sum(counts.near_ties for counts in report.modes),
        report.faults,
        "lossless" if report.passed else "NOT LOSSLESS",
    )


def show(report: AuditReport) -> None:
    """Print the noise, the modes, the first mismatches and the summary."""
    noise = [
        (
            noise.name,
            noise.positions,
            f"{noise.largest:.1e}",
            f"{noise.allowed:.1e}",
            "rounding" if noise.passed else "FAULT",
        )
        for noise in report.noise
    ]
    show_table(
        f"Noise of other step widths and KV slots, against steps of one row ({report.engine})",
        ("width", "positions", "noise", "allowed", "verdict"),
        noise,
    )
    rows = [
        (
            row.mode,
            row.requests,
            row.completions,
            row.tokens,
            row.steps,
            "-" if row.reference else row.identical,
            row.near_ties if row.margin is None else f"{row.near_ties} ({row.margin:.0e})",
            row.faults,
        )
        for row in report.modes
    ]
    columns = ("mode", "requests", "completions", "tokens", "steps", "identical", "near-ties", "faults")
    click.echo()
    show_table("Completions, each token verified by the logits of a step of one row", columns, rows)
    show_mismatches(report)
    click.echo(f"\n{report.summary}")


def show_mismatches(report: AuditReport) -> None:
    """Print the first mismatches, faults first."""
    for graded in sorted(report.mismatches, key=lambda graded: graded.mismatch.near_tie)[:_SHOWN]:
        click.echo(f"\n{described(graded)}")
    if (more := len(report.mismatches) - _SHOWN) > 0:
        click.echo(f"\n{more} more mismatches: --json lists them")


def described(graded: GradedMismatch) -> str:
    """A mismatch in two lines."""
    mismatch = graded.mismatch
    thread = f", thread {'.'.join(map(str, mismatch.path))}" if mismatch.path else ""
    mode = graded.mode if graded.requests == 1 else f"{graded.mode}, {graded.requests} requests"
    head = f"{graded.grade}: prompt {graded.prompt} (line {graded.line}), {mode}{thread}"
    if mismatch.reason:
        return f"{head}: {mismatch.reason}"
    token = f"token {mismatch.token}: expected {graded.expected!r}, found {graded.found!r}"
    return f"{head}, {token} (margin {mismatch.margin:.1e})\n  after {graded.context!r}"
