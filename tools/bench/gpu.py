"""GPU: everything that only a GPU can show, on whatever GPU is here, written as one page.

python -m spaceport.tools.bench.gpu gpu.md --work /big/disk
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from spaceport.exporter.export import Options, export
from spaceport.graphs.contract.faults import InputFault, MissingPart, OptionFault
from spaceport.graphs.contract.manifest import FLAVOURS, LIBRARIES, Flavour
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Precision
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.device import gpu, no_gpu
from spaceport.runtime.backends.opening import Opening
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.admission import capacity_for
from spaceport.tools import cli
from spaceport.tools.bench.checkpoint import SHAPES, make_checkpoint
from spaceport.tools.bench.engines import measure, ways
from spaceport.tools.bench.gpu_page import Page, Shape, markdown
from spaceport.tools.demo.prompts import MODEL, prompts_of

ROWS = (1, 4, 9, 16, 36, 64)
REQUESTS = 8
LENGTH = 1024  # longest text of the bundles that are measured
MISSING = 5  # exit code
_FAULTS = (InputFault, OptionFault, MissingPart, EngineFault)  # of one way: the others are measured all the same
_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime", "tensorrt-cu13", "tensorrt-rtx", "spaceport")


@dataclass(frozen=True)
class Plan:
    """What is measured, and how."""

    work: Path  # where checkpoints and bundles are made, and kept for another run
    backends: tuple[str, ...] = tuple(name for name in BACKENDS if BACKENDS[name].gpu)
    flavours: tuple[Flavour, ...] = FLAVOURS
    rows: tuple[int, ...] = ROWS
    context: int = 256
    rounds: int = 30
    requests: int = REQUESTS
    length: int = LENGTH
    dtype: Precision = "float16"


def machine() -> dict[str, str]:
    """The GPU and what drives it."""
    told = {"GPU": f"{gpu().name}, {gpu().target}, {gpu().memory / 1e9:.0f} GB"} if no_gpu() is None else {}
    told |= {"processor": f"{platform.machine()}, {os.cpu_count()} threads", "Python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            told[package] = version(package)
    return told


def bundle_of(plan: Plan, checkpoint: Path, lowering: Lowering) -> Path:
    """The checkpoint's bundle, exported if it is not there from an earlier run."""
    target = plan.work / f"{checkpoint.name}-{lowering}-{plan.dtype}"
    if not target.exists():
        export(checkpoint, target, Options(lowering=lowering, dtype=plan.dtype))
    return target


def build(plan: Plan, bundle: Path, say: Callable[[str], None]) -> dict[str, str]:
    """Engines by the flavours that are installed, and how each build went."""
    told: dict[str, str] = {}
    for flavour in plan.flavours:
        if find_spec(LIBRARIES[flavour]) is None:
            continue
        say(f"building {bundle.name} with {flavour}")
        asked = ["--flavour", flavour, "--max-requests", str(plan.requests), "--max-seq-len", str(plan.length)]
        started = perf_counter()
        code, answer, why = called(["build", str(bundle), *asked])
        seconds = perf_counter() - started
        if code:
            told[flavour] = f"exit code {code}: {why}"
        else:
            size = answer["engines"][0]["size"]
            told[flavour] = f"{seconds:.0f} s, {size / 1e6:.0f} MB"
    return told


def measure_shape(plan: Plan, checkpoint: Path, say: Callable[[str], None]) -> Shape:
    """Steps of every way that the checkpoint can be run here."""
    bundles = {lowering: open_bundle(bundle_of(plan, checkpoint, lowering)) for lowering in LOWERINGS}
    manifest = bundles["append"].manifest
    shape = Shape(checkpoint.name, manifest.parameters, plan.dtype)
    shape.built = build(plan, bundles["append"].path, say)
    bundles["append"] = open_bundle(bundles["append"].path)
    opening = Opening(capacity_for(manifest, plan.length), plan.requests)
    for backend in plan.backends:
        lowering: Lowering = "append" if BACKENDS[backend].flavour else "scatter"
        found, reasons = ways(bundles[lowering], opening, [backend])
        shape.failed.update(reasons)
        for way in found:
            say(f"measuring {checkpoint.name}, {way}")
            try:
                shape.measured.append(measure(bundles[lowering], way, opening, plan.rows, plan.context, plan.rounds))
            except _FAULTS as error:
                shape.failed[str(way)] = str(error)
    return shape


def checks(plan: Plan, checkpoint: Path, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """Whether engines of a trained model are exact: against PyTorch, and drafted against plain."""
    prompts = plan.work / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps(_as_line(prompt)) + "\n" for prompt in prompts_of(checkpoint).values()), "utf-8"
    )
    told = []
    for lowering in LOWERINGS:
        bundle = bundle_of(plan, checkpoint, lowering)
        if lowering == "append":
            build(plan, bundle, say)
        say(f"checking {bundle.name}")
        code, answer, why = called(["check", str(bundle), str(checkpoint)])
        told.append((f"check, {lowering}", why if code not in (0, 4) else "passed" if answer["passed"] else "FAILED"))
        for backend in plan.backends:
            if (BACKENDS[backend].flavour is None) == (lowering == "scatter"):
                say(f"auditing {bundle.name} on {backend}")
                code, answer, why = called(["audit", str(bundle), str(prompts), "--backend", backend])
                told.append((f"audit, {backend}", answer["statement"] if code in (0, 4) else why))
    return told


def called(arguments: list[str]) -> tuple[int, Any, str]:
    """A command's exit code, the JSON that it prints, and its last word if it fails."""
    out, words = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
        code = cli.run([*arguments, "--json"])
    lines = words.getvalue().strip().splitlines()
    return code, json.loads(out.getvalue() or "null"), lines[-1] if lines else ""


def _as_line(prompt: Any) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--shapes", default="1b,7b", show_default=True, metavar="NAME,…", help=f"Of {', '.join(SHAPES)}.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("gpu-bench"), show_default=True)
@click.option("--rounds", default=30, show_default=True, help="Times that each step is measured.")
def command(out: Path, shapes: str, work: Path, rounds: int) -> None:
    """Build, check, audit and time everything that runs on this machine's GPU; write the tables to OUT."""
    if (reason := no_gpu()) is not None:
        click.echo(f"skipped: {reason}", err=True)
        sys.exit(MISSING)
    wanted = shapes.split(",")
    if unknown := [name for name in wanted if name not in SHAPES]:
        raise click.UsageError(f"--shapes names {unknown[0]!r}: expected {', '.join(SHAPES)}")
    work.mkdir(parents=True, exist_ok=True)
    plan = Plan(work, rounds=rounds)

    def say(what: str) -> None:
        click.echo(what, err=True)

    page = Page(machine(), context=plan.context)
    page.checks = checks(plan, MODEL, say)
    out.write_text(markdown(page), "utf-8")
    for name in wanted:
        checkpoint = work / name
        if not (checkpoint / "config.json").exists():
            say(f"making {name}")
            make_checkpoint(checkpoint, name, dtype=plan.dtype)
        page.shapes.append(measure_shape(plan, checkpoint, say))
        out.write_text(markdown(page), "utf-8")  # after each: a later one may take the machine's time away


if __name__ == "__main__":
    command()
