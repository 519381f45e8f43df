"""Page: what was measured on a GPU, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spaceport.tools.bench.engines import Measured


@dataclass
class Shape:
    """What was measured of a model of one size."""

    name: str
    parameters: int
    dtype: str
    built: dict[str, str] = field(
        default_factory=dict
    )  # flavour -> how long it took and how large it is, or what failed
    measured: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # way -> what it failed of


@dataclass
class Page:
    """Everything that was measured in one run."""

    machine: Mapping[str, str]
    shapes: list[Shape] = field(default_factory=list)
    checks: list[tuple[str, str]] = field(default_factory=list)  # what was held against what, and what came of it
    context: int = 256


def markdown(page: Page) -> str:
    """The page."""
    parts = [
        "# Measured on a GPU",
        "Written by `spaceport bench gpu`, all of it in one run. Models have random weights, which cost what "
        "trained ones cost.",
        table(("what", "value"), list(page.machine.items())),
    ]
    if page.checks:
        parts += ["## Checks", table(("what", "outcome"), page.checks)]
    for shape in page.shapes:
        parts += [
            f"## {shape.name}: {shape.parameters / 1e9:.2f}G weights, {shape.dtype}",
            *_of_shape(shape, page.context),
        ]
    return "\n\n".join(parts) + "\n"


def _of_shape(shape: Shape, context: int) -> Iterable[str]:
    if shape.built:
        yield table(("engine", "build"), list(shape.built.items()))
    if shape.measured:
        rows = [step.rows for step in shape.measured[0].steps]
        yield f"Median milliseconds of a step behind {context} tokens by its rows (and how many steps of one row that is):"
        yield table(("way", *(f"{count}" for count in rows)), [_steps(found) for found in shape.measured])
        yield "Median milliseconds of a round beside the engine, by requests x rows, and what rows cost by the engine's own measure:"
        cases = max((found.outside for found in shape.measured), key=len)
        heads = tuple(f"{cost.requests} x {cost.rows:.0f}" for cost in cases)
        yield table(("way", *heads, "a row, in steps"), [_beside(found, len(heads)) for found in shape.measured])
    notes = [(str(found.way), note) for found in shape.measured for note in found.notes]
    if notes or shape.failed:
        yield table(("way", "note"), [*notes, *shape.failed.items()])


def _steps(found: Measured) -> list[str]:
    return [str(found.way), *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in found.steps)]


def _beside(found: Measured, columns: int) -> list[str]:
    cells = [f"{cost.milliseconds:.2f}" for cost in found.outside]
    return [str(found.way), *cells, *[""] * (columns - len(cells)), f"{found.costs.row:.4f}"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers in columns stand as they are given."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
