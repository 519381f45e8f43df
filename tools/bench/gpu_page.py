"""GPU page: the results of the GPU benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spaceport.tools.bench.engines import EngineMeasurement
from spaceport.tools.bench.steps import StepCost


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
class GpuPage:
    """The results of one run."""

    machine: Mapping[str, str]
    models: list[MeasuredModel] = field(default_factory=list)
    checks: list[tuple[str, str]] = field(default_factory=list)  # check or audit, and its verdict
    context: int = 256


def markdown(page: GpuPage) -> str:
    """The page as Markdown text."""
    parts = [
        "# Measured on a GPU",
        "Written by `spaceport bench gpu` in one run. Models have random weights: they are as fast as trained ones.",
        table(("property", "value"), list(page.machine.items())),
    ]
    if page.checks:
        parts += ["## Checks", table(("check", "outcome"), page.checks)]
    for model in page.models:
        parts += [
            f"## {model.name}: {model.parameters / 1e9:.2f}G weights, {model.dtype}",
            *_of_model(model, page.context),
        ]
    return "\n\n".join(parts) + "\n"


def _of_model(model: MeasuredModel, context: int) -> Iterable[str]:
    if model.built:
        yield table(("engine", "build"), list(model.built.items()))
    if model.measured:
        rows = [step.rows for step in model.measured[0].steps]
        yield f"Median ms per step after {context} tokens, by number of rows (and the ratio to a step of one row):"
        yield table(("variant", *(f"{count}" for count in rows)), [_steps(found) for found in model.measured])
        yield "Median ms per round outside the engine, by requests x rows, and the cost of a row in steps of one row:"
        cases = max((found.outside for found in model.measured), key=len)
        heads = tuple(f"{cost.requests} x {cost.rows:.0f}" for cost in cases)
        yield table(("variant", *heads, "cost of a row"), [_outside(found, len(heads)) for found in model.measured])
    notes = [(str(found.variant), note) for found in model.measured for note in found.notes]
    if notes or model.failed:
        yield table(("variant", "note"), [*notes, *model.failed.items()])


def _steps(found: EngineMeasurement) -> list[str]:
    return [str(found.variant), *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in found.steps)]


def _outside(found: EngineMeasurement, columns: int) -> list[str]:
    cells = [f"{cost.milliseconds:.2f}" for cost in found.outside]
    return [str(found.variant), *cells, *[""] * (columns - len(cells)), f"{_row_cost(found.steps):.4f}"]


def _row_cost(steps: Sequence[StepCost]) -> float:
    """The average cost of a further row, in steps of the smallest width."""
    first, last = steps[0], steps[-1]
    return (last.ratio - first.ratio) / max(1, last.rows - first.rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
