"""`spaceport check`: compare the logits of all backends and of PyTorch, pair by pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spaceport.exporter.checkpoint_files import require_adapter_folder, require_checkpoint
from spaceport.graphs.contract.exactness import NATIVE_MEAN, OTHER_EXPERTS
from spaceport.runtime.backends import BACKENDS, by_reason
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    adapter_option,
    allow_links_option,
    bundle_argument,
    declared_options,
    json_option,
    refuse_unused,
    remote_code_option,
    sections,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.verify.cases import CheckOptions

if TYPE_CHECKING:
    from spaceport.verify.accuracy import LogitDifference
    from spaceport.verify.check import CheckReport


@sections(
    {
        "backends": "What is compared",
        "threads": "Backend",
        "as_json": "Output",
    }
)
@click.command("check", cls=Sectioned)
@bundle_argument
@click.argument("checkpoint", type=PATH, required=False)
@adapter_option
@click.option(
    "--backend",
    "backends",
    type=click.Choice(tuple(BACKENDS)),
    multiple=True,
    help="Backend to compare; repeatable; default: all that can run on this machine.",
)
@declared_options(CheckOptions, defaults=True)
@threads_option
@trust_engines_option
@allow_links_option
@remote_code_option
@json_option("the report")
def command(bundle: Path, allow_links: bool, as_json: bool, **given: Any) -> int:
    """Compare the logits of all backends for BUNDLE, and of PyTorch with CHECKPOINT, on all kinds of runtime calls.

    The tolerance of a pair follows from the coarser of its two data types. The report is saved in the bundle. The exit
    code is 4 if a difference is larger.
    """
    options = CheckOptions(**given)
    unused = Unused(options.checkpoint is None, ("adapter",), "without CHECKPOINT", "name its base model")
    refuse_unused(click.get_current_context(), (unused,))
    opened = open_bundle(bundle, allow_links=allow_links)
    if options.checkpoint is not None:
        require_checkpoint(options.checkpoint)
    if options.adapter is not None:
        require_adapter_folder(options.adapter)
    writable = os.access(opened.path, os.W_OK)
    if not writable:
        click.echo(
            f"{opened.path} is read-only: the report is printed to stdout and not saved in the bundle; --json prints all of it",
            err=True,
        )
    # torch is imported only once the paths are valid
    from spaceport.verify.accuracy import write_report
    from spaceport.verify.check import check

    with stages() as stage:
        report = check(opened, options, stage)
    if as_json:
        show_json(report.as_dict())
    else:
        show_report(report)
    if writable:
        write_report(opened.path, report.as_dict())  # last: the result is shown even if that fails
    return OK if report.passed else ACCURACY


def show_report(report: CheckReport) -> None:
    """Print a row per pair, and the cases of pairs that failed or of the only pair."""
    columns = ("pair", "worst case", "max error", "allowed", "top-1 agreement", "verdict")
    rows = [
        (
            f"{pair.first} - {pair.second}",
            pair.worst.case,
            f"{pair.worst.max_error:.1e}",
            f"{pair.worst.allowed:.1e}",
            f"{100 * pair.agreement:.1f} %",
            _verdict(pair.passed),
        )
        for pair in report.pairs
    ]
    for pair in report.pairs:
        if not pair.passed or len(report.pairs) == 1:
            title = f"{pair.first} and {pair.second}: tolerance {pair.tolerance:g} of the largest logit ({pair.dtype})"
            show_cases(title, pair.differences)
            click.echo()
    shares = {pair.dtype: pair.tolerance for pair in report.pairs}
    stated = ", ".join(f"{share:g} ({dtype})" for dtype, share in shares.items())
    show_table(f"allowed: a fraction of the largest logit of the case: {stated}", columns, rows)
    for pair in report.pairs:
        if pair.experts and pair.beyond:
            click.echo(
                f"{pair.first} and {pair.second}: {pair.beyond} of {pair.rows} rows differ by more, as rounded states "
                f"choose other experts ({OTHER_EXPERTS:.0%} may)"
            )
        if pair.native and pair.mean_error > NATIVE_MEAN:
            click.echo(
                f"{pair.first} and {pair.second}: the mean error is {pair.mean_error:.2g}, {NATIVE_MEAN:g} allowed"
            )
    if report.suspect is not None:
        click.echo(f"in every pair that failed: {report.suspect}")
    for line in by_reason(report.not_compared):
        click.echo(f"not compared: {line}")
    for case in report.skipped:
        click.echo(f"skipped: {case}")
    if report.layers is not None:
        click.echo(f"{report.layers.compared}: {report.layers}")
    if report.quantization is not None:
        click.echo(str(report.quantization))


def show_cases(title: str, differences: tuple[LogitDifference, ...]) -> None:
    """Print a row per case."""
    columns = ("case", "rows", "max error", "allowed", "top-1 agreement", "margin of others", "verdict")
    rows = [
        (
            difference.case,
            difference.rows,
            f"{difference.max_error:.1e}",
            f"{difference.allowed:.1e}",
            f"{100 * (1 - difference.disagreements / max(1, difference.rows)):.1f} %",
            "-" if difference.margin is None else f"{difference.margin:.1e}",
            _verdict(difference.passed),
        )
        for difference in differences
    ]
    show_table(title, columns, rows)
    for fault in dict.fromkeys(difference.fault for difference in differences if difference.fault is not None):
        click.echo(f"failed: {fault}")


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"
