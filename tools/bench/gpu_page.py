"""Page: what was measured on a GPU, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spaceport.tools.bench.engines import EngineMeasurement
from spaceport.tools.bench.steps import StepCost


@dataclass
class MeasuredModel:
    """What was measured of a model of one size."""

    name: str
    parameters: int
    dtype: str
    built: dict[str, str] = field(
        default_factory=dict
    )  # flavour -> how long it took and how large it is, or what failed
    measured: list[EngineMeasurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # way -> what it failed of


@dataclass
class GpuPage:
    """Everything that was measured in one run."""

    machine: Mapping[str, str]
    models: list[MeasuredModel] = field(default_factory=list)
    checks: list[tuple[str, str]] = field(default_factory=list)  # what was held against what, and what came of it
    context: int = 256


def markdown(page: GpuPage) -> str:
    """The page."""
    parts = [
        "# Measured on a GPU",
        "Written by `spaceport bench gpu`, all of it in one run. Models have random weights, which cost what "
        "trained ones cost.",
        table(("what", "value"), list(page.machine.items())),
    ]
    if page.checks:
        parts += ["## Checks", table(("what", "outcome"), page.checks)]
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
        yield f"Median milliseconds of a step behind {context} tokens by its rows (and how many steps of one row that is):"
        yield table(("way", *(f"{count}" for count in rows)), [_steps(found) for found in model.measured])
        yield "Median milliseconds of a round beside the engine, by requests x rows, and what a row adds on average:"
        cases = max((found.outside for found in model.measured), key=len)
        heads = tuple(f"{cost.requests} x {cost.rows:.0f}" for cost in cases)
        yield table(("way", *heads, "a row, in steps"), [_beside(found, len(heads)) for found in model.measured])
    notes = [(str(found.variant), note) for found in model.measured for note in found.notes]
    if notes or model.failed:
        yield table(("way", "note"), [*notes, *model.failed.items()])


def _steps(found: EngineMeasurement) -> list[str]:
    return [str(found.variant), *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in found.steps)]


def _beside(found: EngineMeasurement, columns: int) -> list[str]:
    cells = [f"{cost.milliseconds:.2f}" for cost in found.outside]
    return [str(found.variant), *cells, *[""] * (columns - len(cells)), f"{_row(found.steps):.4f}"]


def _row(steps: Sequence[StepCost]) -> float:
    """What a row costs on average, in steps of the fewest rows."""
    first, last = steps[0], steps[-1]
    return (last.ratio - first.ratio) / max(1, last.rows - first.rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers in columns stand as they are given."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
