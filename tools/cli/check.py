"""`spaceport check`: everything that can run a bundle here, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import BACKENDS, by_reason
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.tools.cli.audit import show as show_audit
from spaceport.tools.cli.exit_codes import ACCURACY, OK
from spaceport.tools.cli.inspect import accuracy
from spaceport.tools.cli.options import (
    PATH,
    Unused,
    bundle_argument,
    json_option,
    refuse_unused,
    remote_code_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.reference import open_reference
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.verify.accuracy import LogitDifference, write_report
from spaceport.tools.verify.audit.audit_report import AuditReport
from spaceport.tools.verify.audit.bundle_audit import AuditOptions, audit_bundle
from spaceport.tools.verify.audit.prompts import read_prompts
from spaceport.tools.verify.check.check import CheckReport, check
from spaceport.tools.verify.check.engines import DEFAULT_LONG, SHORTEST, CheckOptions
from spaceport.tools.verify.check.outputs import save_outputs
from spaceport.tools.verify.check.polygraphy_commands import commands_for
from spaceport.tools.verify.check.quantization import measure_quantization

_OF_A_CHECK = ("backends", "length", "layers", "prompts", "seed", "trust_engines", "as_json")  # options of nothing else


@click.command("check")
@bundle_argument
@click.argument("checkpoint", type=PATH, required=False)
@click.option(
    "--backend",
    "backends",
    type=click.Choice(tuple(BACKENDS)),
    multiple=True,
    help="Compare this one; may be said again. By default all that can run here.",
)
@click.option(
    "--long",
    "length",
    type=int,
    metavar="N",
    help=f"Tokens of the long-context case; by default {DEFAULT_LONG}, or what the model and all engines have room for.",
)
@click.option("--layers", is_flag=True, help="Find the first value of a layer that is out of tolerance.")
@click.option(
    "--audit",
    "prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PROMPTS",
    help="Then hold drafted texts to plain ones over this file of prompts, on each engine, as `spaceport audit` does.",
)
@click.option("--print-polygraphy", is_flag=True, help="Print stock Polygraphy command lines for this, and do no more.")
@click.option(
    "--save-outputs",
    "outputs",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what CHECKPOINT gives on the inputs of those lines, for `polygraphy run --load-outputs`, and do no more.",
)
@threads_option
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random prompts and trees."
)
@trust_engines_option
@remote_code_option
@json_option("the report")
@click.pass_context
def command(
    context: click.Context,
    bundle: Path,
    checkpoint: Path | None,
    backends: tuple[str, ...],
    length: int | None,
    layers: bool,
    prompts: Path | None,
    print_polygraphy: bool,
    outputs: Path | None,
    threads: int,
    seed: int,
    trust_engines: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Compare the engines of BUNDLE, and the PyTorch model in CHECKPOINT, on every kind of call that the runtime makes.

    Each pair may differ by what rounding explains in the coarser of its two types. The report stays in the bundle. Exit
    code 4 if a difference is larger.
    """
    if length is not None and length < SHORTEST:
        raise OptionFault(f"--long is {length}: expected at least {SHORTEST}")
    _refuse_unused(context, print_polygraphy, outputs)
    options = CheckOptions(checkpoint, backends, length, threads, seed, trust_remote_code, trust_engines, layers)
    opened = open_bundle(bundle)
    if length is not None and length > opened.manifest.max_positions:
        raise OptionFault(f"--long is {length}: expected at most {opened.manifest.max_positions}, what the model knows")
    if print_polygraphy:
        show_lines(opened, checkpoint)
        return OK
    if outputs is not None:
        save(opened, options, outputs)
        return OK
    with stages() as stage:
        if prompts is not None:
            read_prompts(prompts)  # a mistake in them is told before minutes of work
        report = check(opened, options, stage)
        quantization = None if checkpoint is None else measure_quantization(opened, checkpoint, trust_remote_code, seed)
        audits = {} if prompts is None else audits_of(opened, report, options, prompts, stage)
    if as_json:
        more = {"audits": {backend: one.as_dict() for backend, one in audits.items()}} if audits else {}
        if quantization is not None:
            more["quantization"] = quantization.as_dict()
        show_json({**report.as_dict(), **more})
    else:
        show(report)
        if quantization is not None:
            click.echo(str(quantization))
        for one in audits.values():
            click.echo()
            show_audit(one)
    write_report(opened.path, report.as_dict())  # last: what was found is told also where it cannot be kept
    return OK if report.passed and all(one.passed for one in audits.values()) else ACCURACY


def _refuse_unused(context: click.Context, print_polygraphy: bool, outputs: Path | None) -> None:
    """Raise for what a check would heed, where none is made."""
    never = (*_OF_A_CHECK, "outputs", "threads", "trust_remote_code")
    refuse_unused(
        context,
        (
            Unused(print_polygraphy, never, "with --print-polygraphy", "run the check without --print-polygraphy"),
            Unused(outputs is not None, _OF_A_CHECK, "with --save-outputs", "run the check without --save-outputs"),
        ),
    )


def audits_of(
    bundle: Bundle, report: CheckReport, options: CheckOptions, prompts: Path, stage: Callable[[str], None]
) -> dict[str, AuditReport]:
    """What drafts change in texts, on each backend that was compared."""
    settings = AuditOptions(threads=options.threads, trust_engines=options.trust_engines)
    compared = [backend for backend in options.backends or BACKENDS if backend not in report.not_compared]
    return {backend: audit_bundle(bundle.path, prompts, backend, settings, stage) for backend in compared}


def show_lines(bundle: Bundle, checkpoint: Path | None) -> None:
    """Command lines to paste."""
    found = accuracy(bundle) or {}
    cases = found.get("cases")
    told_of = [case.get("largest_logit") for case in cases if isinstance(case, dict)] if isinstance(cases, list) else []
    largest = max((logit for logit in told_of if isinstance(logit, float)), default=None)
    if largest is None:
        click.echo("# errors are allowed as for logits up to 1: after `spaceport check` as for those of this model")
    click.echo("\n\n".join(map(str, commands_for(bundle, checkpoint, largest or 1.0))))


def save(bundle: Bundle, options: CheckOptions, file: Path) -> None:
    """The PyTorch model's outputs on what the shipped loader gives Polygraphy."""
    if options.checkpoint is None:
        raise OptionFault("--save-outputs writes what PyTorch gives: expected a CHECKPOINT behind the bundle")
    engine = open_reference(bundle, options.checkpoint, 1, 1, "float32", options.remote_code, options.threads)
    count = save_outputs(engine, bundle.manifest, file)
    click.echo(f"{file}: what PyTorch float32 gives in {count} calls")


def show(report: CheckReport) -> None:
    """The pairs in a line each, and the cases of those that failed, or of the only one."""
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
            title = f"{pair.first} and {pair.second}: up to {pair.tolerance:g} of the largest logit ({pair.dtype})"
            show_cases(title, pair.differences)
            click.echo()
    shares = {pair.dtype: pair.tolerance for pair in report.pairs}
    stated = ", ".join(f"{share:g} ({dtype})" for dtype, share in shares.items())
    show_table(f"allowed is a share of a case's largest logit: {stated}", columns, rows)
    if report.suspect is not None:
        click.echo(f"in every pair that failed: {report.suspect}")
    for line in by_reason(report.not_compared):
        click.echo(f"not compared: {line}")
    for case in report.skipped:
        click.echo(f"skipped: {case}")
    if report.layers is not None:
        click.echo(f"{report.layers.compared}: {report.layers}")


def show_cases(title: str, differences: tuple[LogitDifference, ...]) -> None:
    """The cases of a pair."""
    columns = ("case", "rows", "max error", "allowed", "top-1 agreement", "margin where not", "verdict")
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
