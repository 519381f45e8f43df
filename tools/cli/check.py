"""`spaceport check`: a bundle's engine against the PyTorch model that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from spaceport.exporter.accuracy import TOLERANCE, Finding, compare, write_report
from spaceport.graphs.faults import OptionFault
from spaceport.runtime.admission import capacity_for
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.opening import Opening
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.tools.check import cases
from spaceport.tools.cli.screen import show_json, show_table, stages
from spaceport.tools.reference import open_reference

FAILED = 4  # exit code


@click.command("check")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--long",
    "length",
    type=int,
    default=cases.DEFAULT_LONG,
    show_default=True,
    help="Tokens of the long-context case; the model's limit cuts it.",
)
@click.option("--backend", type=click.Choice(("auto", "onnxruntime")), default="auto", show_default=True)
@click.option("--threads", default=0, metavar="N", help="Processor threads; 0 means one for each core.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random prompts and trees."
)
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    bundle: Path,
    checkpoint: Path,
    length: int,
    backend: str,
    threads: int,
    seed: int,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Compare BUNDLE with CHECKPOINT on every kind of call that the runtime makes; the report stays in the bundle.

    Exit code 4 if a difference is larger than rounding explains.
    """
    if length < 32:
        raise OptionFault(f"--long is {length}: expected at least 32")
    opened = open_bundle(bundle)
    with stages() as stage:
        findings = check(opened, checkpoint, length, backend, threads, seed, trust_remote_code, stage)
    report = report_of(opened, findings)
    write_report(opened.path, report)
    if as_json:
        show_json(report)
    else:
        show(opened, findings)
    return 0 if report["passed"] else FAILED


def check(
    bundle: Bundle, checkpoint: Path, length: int, backend: str, threads: int, seed: int, remote_code: bool, stage: Any
) -> list[Finding]:
    """The findings on every case."""
    manifest = bundle.manifest
    length = min(length, manifest.max_positions)
    capacity = capacity_for(manifest, length + 64)
    stage("loading the reference")
    reference = open_reference(bundle, checkpoint, capacity, cases.REQUESTS, "float32", remote_code, threads)
    stage("recording the cases on the reference")
    feeds = cases.record(reference, manifest, length, seed)
    stage("comparing")
    engine = open_engine(bundle, backend, Opening(capacity, cases.REQUESTS, threads))
    try:
        return compare(cases.replay(engine), feeds, TOLERANCE[manifest.signature.dtype])
    finally:
        engine.close()


def report_of(bundle: Bundle, findings: Sequence[Finding]) -> dict[str, Any]:
    """What is written into the bundle and printed as JSON."""
    return {
        "passed": all(finding.passed for finding in findings),
        "reference": "PyTorch, float32",
        "engine": f"onnxruntime, cpu, {bundle.manifest.signature.dtype}",
        "tolerance": TOLERANCE[bundle.manifest.signature.dtype],
        "model": bundle.manifest.files["model.onnx"].sha256,
        "cases": [finding.as_dict() for finding in findings],
    }


def show(bundle: Bundle, findings: Sequence[Finding]) -> None:
    """The table of cases."""
    rows = [
        (
            finding.case,
            finding.rows,
            f"{finding.max_error:.1e}",
            f"{finding.mean_error:.1e}",
            f"{100 * (1 - finding.disagreements / max(1, finding.rows)):.1f} %",
            "-" if finding.margin is None else f"{finding.margin:.1e}",
            "PASS" if finding.passed else "FAIL",
        )
        for finding in findings
    ]
    tolerance = TOLERANCE[bundle.manifest.signature.dtype]
    columns = ("case", "rows", "max error", "mean error", "top-1 agreement", "margin where not", "verdict")
    show_table(f"onnxruntime against PyTorch float32; passes up to {tolerance:g} of the largest logit", columns, rows)
