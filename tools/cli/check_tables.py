"""Check tables: the report of a check, with a row for each pair of engines and for each case."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spaceport.runtime.backends import by_reason
from spaceport.tools.cli.audit import show as show_audit
from spaceport.tools.terminal.screen import show_json, show_table

if TYPE_CHECKING:
    from spaceport.tools.verify.accuracy import LogitDifference
    from spaceport.tools.verify.check.check import CheckReport
    from spaceport.tools.verify.check.outcome import CheckOutcome


def show_outcome(outcome: CheckOutcome, as_json: bool) -> None:
    """Print the report, the error of quantization and the audits."""
    if as_json:
        show_json(outcome.as_dict())
        return
    show(outcome.report)
    if outcome.quantization is not None:
        click.echo(str(outcome.quantization))
    for audit in outcome.audits.values():
        click.echo()
        show_audit(audit)


def show(report: CheckReport) -> None:
    """Print a row per pair, and the cases of pairs that failed or of the only pair."""
    columns = ("pair", "worst case", "max error", "allowed", "top-1 agreement", "verdict")
    rows = [
        (
            f"{pair.first} - {pair.second}",
            pair.worst.case,
            _number(pair.worst.max_error),
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
    if report.suspect is not None:
        click.echo(f"in every pair that failed: {report.suspect}")
    for line in by_reason(report.not_compared):
        click.echo(f"not compared: {line}")
    for case in report.skipped:
        click.echo(f"skipped: {case}")
    if report.layers is not None:
        click.echo(f"{report.layers.compared}: {report.layers}")


def show_cases(title: str, differences: tuple[LogitDifference, ...]) -> None:
    """Print a row per case."""
    columns = ("case", "rows", "max error", "allowed", "top-1 agreement", "margin of others", "verdict")
    rows = [
        (
            difference.case,
            difference.rows,
            _number(difference.max_error),
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


def _number(error: float) -> str:
    return f"{error:.1e}"


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"
