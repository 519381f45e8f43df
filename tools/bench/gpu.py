"""GPU benchmark: builds, checks, audits and step times of everything that runs on this machine's GPU."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import FLAVOURS, LIBRARIES, Flavour
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Precision
from spaceport.runtime.backends import BACKENDS, open_engine, why_not
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import EngineFault, EngineOptions, capacity_for
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.bench.steps import CASES, RoundCost, StepCost, outside_cost, step_costs
from spaceport.tools.demo.prompts import prompts_of

ROWS = (1, 4, 9, 16, 36, 64)
REQUESTS = 8
LENGTH = 1024  # maximum context length in tokens
# Errors of one variant: the others are still measured.
_FAULTS = (InputFault, OptionFault, MissingDependency, EngineFault)
_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime", "tensorrt-cu13", "tensorrt-rtx", "spaceport")


@dataclass(frozen=True)
class EngineVariant:
    """A backend and its CUDA graph setting."""

    backend: str
    graphs: bool  # use CUDA graphs

    def __str__(self) -> str:
        if not BACKENDS[self.backend].gpu:
            return self.backend
        return f"{self.backend}, {'CUDA graphs' if self.graphs else 'no CUDA graphs'}"


@dataclass(frozen=True)
class EngineMeasurement:
    """The measurements of one variant."""

    variant: EngineVariant
    device: str
    steps: tuple[StepCost, ...]
    outside: tuple[RoundCost, ...]  # time per round outside the engine
    notes: tuple[str, ...]


def engine_variants(
    bundle: Bundle, engine_options: EngineOptions, backends: Sequence[str]
) -> tuple[list[EngineVariant], dict[str, str]]:
    """The variants that can run a bundle here, and by backend the reasons why others cannot."""
    found: list[EngineVariant] = []
    reasons: dict[str, str] = {}
    for backend in backends:
        reason = why_not(bundle, backend, engine_options)
        if reason is not None:
            reasons[backend] = reason
        else:
            found += [
                EngineVariant(backend, graphs) for graphs in ((False, True) if BACKENDS[backend].gpu else (False,))
            ]
    return found, reasons


def measure_engine(
    bundle: Bundle,
    variant: EngineVariant,
    engine_options: EngineOptions,
    rows: Sequence[int],
    context: int,
    rounds: int,
) -> EngineMeasurement:
    """Step times by number of rows, and the time of scheduler rounds outside the engine."""
    engine = open_engine(bundle, variant.backend, replace(engine_options, graphs=variant.graphs))
    try:
        steps = step_costs(engine, rows, context, rounds)
        cases = [case for case in CASES if case[0] <= engine_options.requests]
        rounds_outside = [outside_cost(bundle, engine, requests, wide, rounds, None) for requests, wide in cases]
        return EngineMeasurement(variant, engine.device, tuple(steps), tuple(rounds_outside), engine.notes)
    finally:
        engine.close()


@dataclass
class MeasuredModel:
    """The results of one model."""

    name: str
    parameters: int
    dtype: str
    built: dict[str, str] = field(default_factory=dict)  # flavour -> build time and size, or the error
    measured: list[EngineMeasurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # variant -> error


@dataclass
class GpuResults:
    """The results of one run."""

    machine: Mapping[str, str]
    models: list[MeasuredModel] = field(default_factory=list)
    checks: list[tuple[str, str]] = field(default_factory=list)  # check or audit, and its verdict
    context: int = 256

    def report(self) -> Report:
        """The results as tables."""
        settings = (
            "# Measured on a GPU",
            "",
            "Written by `spaceport bench gpu` in one run. Models have random weights: they are as fast as trained ones.",
        )
        tables = [
            Table("", ("property", "value"), list(self.machine.items())),
            Table("Checks", ("check", "outcome"), self.checks),
        ]
        tables += [table for model in self.models for table in _model_tables(model, self.context)]
        return Report(settings, tables, (), {})


def _model_tables(model: MeasuredModel, context: int) -> Iterable[Table]:
    """The tables of one model; the first one has the model as its title."""
    name = f"{model.name}: {model.parameters / 1e9:.2f}G weights, {model.dtype}"
    yield Table(f"{name}: engines", ("engine", "build"), list(model.built.items()))
    if model.measured:
        rows = [str(step.rows) for step in model.measured[0].steps]
        title = (
            f"{name}: median ms per step after {context} tokens, by number of rows (and the ratio to a step of one row)"
        )
        yield Table(title, ("variant", *rows), [_steps(measurement) for measurement in model.measured])
        title = f"{name}: median ms per round outside the engine, by requests x rows, and the cost of a row in steps of one row"
        cases = max((measurement.outside for measurement in model.measured), key=len)
        heads = tuple(f"{cost.requests} x {cost.rows:.0f}" for cost in cases)
        costs = [_outside(measurement, len(heads)) for measurement in model.measured]
        yield Table(title, ("variant", *heads, "cost of a row"), costs)
    notes = [(str(measurement.variant), note) for measurement in model.measured for note in measurement.notes]
    yield Table(f"{name}: notes", ("variant", "note"), [*notes, *model.failed.items()])


def _steps(found: EngineMeasurement) -> list[str]:
    return [str(found.variant), *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in found.steps)]


def _outside(found: EngineMeasurement, columns: int) -> list[str]:
    cells = [f"{cost.milliseconds:.2f}" for cost in found.outside]
    return [str(found.variant), *cells, *[""] * (columns - len(cells)), f"{_row_cost(found.steps):.4f}"]


def _row_cost(steps: Sequence[StepCost]) -> float:
    """The average cost of a further row, in steps of the smallest width."""
    first, last = steps[0], steps[-1]
    return (last.ratio - first.ratio) / max(1, last.rows - first.rows)


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


def machine_rows() -> dict[str, str]:
    """The GPU, the CPU and the package versions, as table rows."""
    rows = {"GPU": f"{gpu().name}, {gpu().target}, {gpu().memory / 1e9:.0f} GB"} if no_gpu() is None else {}
    rows |= {"CPU": f"{platform.machine()}, {os.cpu_count()} threads", "Python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            rows[package] = version(package)
    return rows


def exported_bundle(options: GpuBenchOptions, checkpoint: Path, lowering: Lowering) -> Path:
    """The checkpoint's bundle, exported unless an earlier run did."""
    target = options.work / f"{checkpoint.name}-{lowering}-{options.dtype}"
    if not target.exists():
        export(checkpoint, target, ExportOptions(lowering=lowering, dtype=options.dtype))
    return target


def build_engines(
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
    bundles = {lowering: open_bundle(exported_bundle(options, checkpoint, lowering)) for lowering in LOWERINGS}
    manifest = bundles["append"].manifest
    model = MeasuredModel(checkpoint.name, manifest.parameters, options.dtype)
    model.built = build_engines(options, bundles["append"].path, run, on_progress)
    bundles["append"] = open_bundle(bundles["append"].path)
    engine_options = EngineOptions(capacity_for(manifest, options.length), options.requests)
    for backend in options.backends:
        lowering: Lowering = "append" if BACKENDS[backend].flavour else "scatter"
        found, reasons = engine_variants(bundles[lowering], engine_options, [backend])
        model.failed.update(reasons)
        for variant in found:
            on_progress(f"measuring {checkpoint.name}, {variant}")
            try:
                model.measured.append(
                    measure_engine(
                        bundles[lowering], variant, engine_options, options.rows, options.context, options.rounds
                    )
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
        bundle = exported_bundle(options, checkpoint, lowering)
        if lowering == "append":
            build_engines(options, bundle, run, on_progress)
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
