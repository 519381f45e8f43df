"""GPU benchmark: builds, checks, audits and step times of everything that runs on this machine's GPU."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import FLAVOURS, LIBRARIES, Flavour
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Precision
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import EngineFault, EngineOptions
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.tools.bench.engines import measure, variants
from spaceport.tools.bench.gpu_page import MeasuredModel
from spaceport.tools.demo.prompts import prompts_of

ROWS = (1, 4, 9, 16, 36, 64)
REQUESTS = 8
LENGTH = 1024  # maximum context length in tokens
_FAULTS = (
    InputFault,
    OptionFault,
    MissingDependency,
    EngineFault,
)  # errors of one variant: the others are still measured
_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime", "tensorrt-cu13", "tensorrt-rtx", "spaceport")


@dataclass(frozen=True)
class CommandResult:
    """The result of a `spaceport` command."""

    exit_code: int
    answer: Any  # the JSON that it printed; None if it failed
    failure: str  # the last line on stderr


RunCommand = Callable[[list[str]], CommandResult]  # runs `spaceport ARGUMENTS --json`


@dataclass(frozen=True)
class GpuBenchOptions:
    """What is measured, and how."""

    work: Path  # folder of checkpoints and bundles, reused by later runs
    backends: tuple[str, ...] = tuple(name for name in BACKENDS if BACKENDS[name].gpu)
    flavours: tuple[Flavour, ...] = FLAVOURS
    rows: tuple[int, ...] = ROWS
    context: int = 256
    rounds: int = 30
    requests: int = REQUESTS
    length: int = LENGTH
    dtype: Precision = "float16"


def machine() -> dict[str, str]:
    """The GPU, the CPU and the package versions, as table rows."""
    rows = {"GPU": f"{gpu().name}, {gpu().target}, {gpu().memory / 1e9:.0f} GB"} if no_gpu() is None else {}
    rows |= {"CPU": f"{platform.machine()}, {os.cpu_count()} threads", "Python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            rows[package] = version(package)
    return rows


def bundle_of(options: GpuBenchOptions, checkpoint: Path, lowering: Lowering) -> Path:
    """The checkpoint's bundle, exported unless an earlier run did."""
    target = options.work / f"{checkpoint.name}-{lowering}-{options.dtype}"
    if not target.exists():
        export(checkpoint, target, ExportOptions(lowering=lowering, dtype=options.dtype))
    return target


def build(
    options: GpuBenchOptions, bundle: Path, run: RunCommand, on_progress: Callable[[str], None]
) -> dict[str, str]:
    """Build an engine for each installed flavour; returns build time and size, or the error, by flavour."""
    outcomes: dict[str, str] = {}
    for flavour in options.flavours:
        if find_spec(LIBRARIES[flavour]) is None:
            continue
        on_progress(f"building {bundle.name} with {flavour}")
        flags = ["--backend", flavour, "--max-requests", str(options.requests), "--max-seq-len", str(options.length)]
        started = perf_counter()
        result = run(["build", str(bundle), *flags])
        seconds = perf_counter() - started
        if result.answer is None:
            outcomes[flavour] = f"exit code {result.exit_code}: {result.failure}"
        else:
            size = result.answer["engines"][0]["size"]
            outcomes[flavour] = f"{seconds:.0f} s, {size / 1e6:.0f} MB"
    return outcomes


def measure_model(
    options: GpuBenchOptions, checkpoint: Path, run: RunCommand, on_progress: Callable[[str], None]
) -> MeasuredModel:
    """The step times of a checkpoint on every variant that can run it here."""
    bundles = {lowering: open_bundle(bundle_of(options, checkpoint, lowering)) for lowering in LOWERINGS}
    manifest = bundles["append"].manifest
    model = MeasuredModel(checkpoint.name, manifest.parameters, options.dtype)
    model.built = build(options, bundles["append"].path, run, on_progress)
    bundles["append"] = open_bundle(bundles["append"].path)
    engine_options = EngineOptions(capacity_for(manifest, options.length), options.requests)
    for backend in options.backends:
        lowering: Lowering = "append" if BACKENDS[backend].flavour else "scatter"
        found, reasons = variants(bundles[lowering], engine_options, [backend])
        model.failed.update(reasons)
        for variant in found:
            on_progress(f"measuring {checkpoint.name}, {variant}")
            try:
                model.measured.append(
                    measure(bundles[lowering], variant, engine_options, options.rows, options.context, options.rounds)
                )
            except _FAULTS as error:
                model.failed[str(variant)] = str(error)
    return model


def checks(
    options: GpuBenchOptions, checkpoint: Path, run: RunCommand, on_progress: Callable[[str], None]
) -> list[tuple[str, str]]:
    """The verdicts of `check` and `audit` on a trained checkpoint, as table rows."""
    prompts = options.work / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps(_as_line(prompt)) + "\n" for prompt in prompts_of(checkpoint).values()), "utf-8"
    )
    rows = []
    for lowering in LOWERINGS:
        bundle = bundle_of(options, checkpoint, lowering)
        if lowering == "append":
            build(options, bundle, run, on_progress)
        on_progress(f"checking {bundle.name}")
        result = run(["check", str(bundle), str(checkpoint)])
        passed = result.answer is not None and result.answer["passed"]
        verdict = "passed" if passed else "FAILED"
        rows.append((f"check, {lowering}", result.failure if result.answer is None else verdict))
        for backend in options.backends:
            if (BACKENDS[backend].flavour is None) == (lowering == "scatter"):
                on_progress(f"auditing {bundle.name} on {backend}")
                result = run(["audit", str(bundle), str(prompts), "--backend", backend])
                summary = result.failure if result.answer is None else result.answer["summary"]
                rows.append((f"audit, {backend}", summary))
    return rows


def _as_line(prompt: Any) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
