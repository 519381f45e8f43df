"""The campaign as a command: python -m attack --work build/attack --seconds 180 --seed 1."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from attack.bundles import mutated_bundles, swapped_bundles
from attack.fork_bombs import fork_bombs
from attack.grammars import slow_grammars
from attack.injections import injected_tokens
from attack.kills import killed_commands
from attack.outcome import Budget, Outcome, table
from attack.requests import hostile_requests
from attack.soak import soak
from attack.templates import hostile_templates
from spaceport.runtime import BundleError, open_bundle
from support.paths import DEMO, TINY

PARTS: dict[str, Callable[[Path, Path, int, Budget], Outcome]] = {
    "mutations": lambda tiny, work, seed, budget: mutated_bundles(tiny, work, seed, budget),
    "swaps": lambda tiny, work, seed, budget: swapped_bundles(tiny, work, seed, budget),
    "kills": lambda tiny, work, seed, budget: killed_commands(work, seed, budget),
    "templates": lambda tiny, work, seed, budget: hostile_templates(tiny, work, seed, budget),
    "injections": lambda tiny, work, seed, budget: injected_tokens(_demo(work), seed, budget),
    "grammars": lambda tiny, work, seed, budget: slow_grammars(_demo(work), seed, budget),
    "bombs": lambda tiny, work, seed, budget: fork_bombs(_demo(work), seed, budget),
    "requests": lambda tiny, work, seed, budget: hostile_requests(_demo(work), seed, budget),
    "soak": lambda tiny, work, seed, budget: soak(tiny, seed, budget),
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
    tiny, parts, outcomes = _exported(TINY, work / "tiny.bundle"), only or tuple(PARTS), []
    for name in parts:
        click.echo(f"attack: {name}", err=True)
        began = time.monotonic()
        outcome = PARTS[name](tiny, work, seed, Budget(seconds / len(parts), cases))
        outcome.seconds = time.monotonic() - began
        outcomes.append(outcome)
    click.echo(table(outcomes))
    if any(outcome.failures for outcome in outcomes):
        raise SystemExit(1)


def _demo(work: Path) -> Path:
    return _exported(DEMO, work / "demo.bundle")


def _exported(checkpoint: Path, target: Path) -> Path:
    """The bundle of a checkpoint, exported unless it is there."""
    with suppress(BundleError):
        open_bundle(target)
        return target
    command = [
        sys.executable,
        "-c",
        "from spaceport.tools.cli import main; main()",
        "export",
        str(checkpoint),
        str(target),
        "--overwrite",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


if __name__ == "__main__":
    main()
