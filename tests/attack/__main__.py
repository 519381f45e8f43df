"""The campaign as a command: python -m attack --work build/attack --seconds 180 --seed 1."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from attack.mutations import mutated_bundles
from attack.outcome import Budget, Outcome, table
from attack.requests import hostile_requests, soak
from attack.service import strangers
from support.paths import DEMO, TINY

PARTS: dict[str, Callable[[Path, int, Budget], Outcome | list[Outcome]]] = {
    "mutations": lambda work, seed, budget: mutated_bundles(_bundle(TINY), work, seed, budget),
    "requests": lambda work, seed, budget: hostile_requests(_bundle(DEMO), seed, budget),
    "soak": lambda work, seed, budget: soak(_bundle(TINY), seed, budget),
    "service": lambda work, seed, budget: strangers(_bundle(DEMO), seed, budget),
}
_EXPORT = (
    "import sys; from pathlib import Path; from support.exported import bundle_of; print(bundle_of(Path(sys.argv[1])))"
)


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
        began = time.monotonic()
        part = PARTS[name](work, seed, Budget(seconds / len(parts), cases))
        if isinstance(part, Outcome):
            part.seconds = time.monotonic() - began
            part = [part]
        outcomes += part
    click.echo(table(outcomes))
    if any(outcome.failures for outcome in outcomes):
        raise SystemExit(1)


def _bundle(checkpoint: Path) -> Path:
    """The bundle of a checkpoint; this process does not import torch, whose memory a soak would show."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _EXPORT, str(checkpoint)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Path(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
