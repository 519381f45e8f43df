"""The campaign as a command: python -m attack --work build/attack --seconds 180 --seed 1."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click

from attack.mutations import damaged_bundles, mutated_bundles
from attack.outcome import Budget, Outcome, table
from attack.requests import hostile_requests
from attack.service import soak, strangers
from support.exported import bundle_in
from support.paths import DEMO, TINY


def _bundle(checkpoint: Path, format_name: str = "int8") -> Path:
    """The bundle of a checkpoint; this process does not import torch, whose memory a part would show."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(bundle_in, checkpoint, format_name).result()


def _mutations(work: Path, seed: int, budget: Budget) -> list[Outcome]:
    """Files of a bundle in float32, and the graph of a native one."""
    parts = {"float32": mutated_bundles, "int8": damaged_bundles}
    half = Budget(budget.seconds / len(parts), budget.cases)
    return [part(_bundle(TINY, name), work, seed, half) for name, part in parts.items()]


PARTS: dict[str, Callable[[Path, int, Budget], list[Outcome]]] = {
    "mutations": _mutations,
    "requests": lambda work, seed, budget: [hostile_requests(_bundle(DEMO), seed, budget)],
    "soak": lambda work, seed, budget: [soak(_bundle(DEMO), seed, budget)],
    "service": lambda work, seed, budget: strangers(_bundle(DEMO), seed, budget),
}


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/attack"), help="Folder for bundles.")
@click.option("--seconds", default=180.0, help="Time of all parts together, exports not included.", show_default=True)
@click.option("--cases", default=10**9, help="Maximum cases of each part.")
@click.option("--seed", default=1, help="Seed of all cases.", show_default=True)
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Run these parts only.")
def main(work: Path, seconds: float, cases: int, seed: int, only: tuple[str, ...]) -> None:
    """Run all parts, print a table, and exit with status 1 if any case failed."""
    work.mkdir(parents=True, exist_ok=True)
    parts, outcomes = only or tuple(PARTS), list[Outcome]()
    for name in parts:
        click.echo(f"attack: {name}", err=True)
        outcomes += PARTS[name](work, seed, Budget(seconds / len(parts), cases))
    click.echo(table(outcomes))
    if any(outcome.failures for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
