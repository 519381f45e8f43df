"""Other CPUs as a command: python -m cpus --work build/cpus, or --setup to download and build what that needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from cpus.machines import MACHINES, Machine, environment_for
from support.exported import bundle_in
from support.paths import ROOT, TINY
from support.programs import Missing

BUNDLES = ("float32", "float16", "int8", "int4")  # formats


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/cpus"), help="Folder for what is built.")
@click.option("--only", multiple=True, type=click.Choice([*MACHINES]), help="Run on this CPU only; may be repeated.")
@click.option("--setup", is_flag=True, help="Download and build what the CPUs need, and run nothing.")
@click.option("--pytest", "tests", is_flag=True, help="Run pytest with ARGUMENTS as on the CPU of --only instead.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--allow-missing", is_flag=True, help="Exit with 0 although a CPU cannot be imitated here.")
def main(
    work: Path, only: tuple[str, ...], setup: bool, tests: bool, arguments: tuple[str, ...], allow_missing: bool
) -> None:
    """Probe and audit small bundles of all formats as on other CPUs; fails if a default draft changes a text."""
    machines = [MACHINES[name] for name in only or MACHINES]
    ready, missing = _prepared(machines, work)
    if tests:
        _run_pytest(ready, work, arguments)
    if not setup:
        bundles = [f"{name}={bundle_in(TINY, name)}" for name in BUNDLES]
        results = [_audited(machine, work, bundles) for machine in ready]
        changed = sum(result is not None and result["changed"] for result in results)
        failed = sum(result is None for result in results)
        click.echo(
            f"cpus: {len(ready) - failed} of {len(machines)} run, {failed} failed, {missing} missing; "
            f"{changed} drafted texts changed"
        )
        if changed or failed:
            sys.exit(1)
    if missing and not allow_missing:
        sys.exit(1)


def _prepared(machines: list[Machine], work: Path) -> tuple[list[Machine], int]:
    ready = []
    for machine in machines:
        folder = work / machine.name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            machine.prepare(folder)
            machine.command(folder, ())
        except Missing as reason:
            click.echo(f"{machine.name}: not run: {reason}")
        else:
            ready.append(machine)
    return ready, len(machines) - len(ready)


def _run_pytest(ready: list[Machine], work: Path, arguments: tuple[str, ...]) -> NoReturn:
    """Replace this process by pytest on the only CPU."""
    if len(ready) != 1 or ready[0].emulated:
        names = ", ".join(machine.name for machine in ready) or "none that can run"
        raise click.UsageError(f"--pytest with {names}: expected --only avx2, which runs at full speed")
    command, own = ready[0].command(work / ready[0].name, ("-m", "pytest", *arguments))
    os.execve(command[0], command, {**os.environ, **own})


def _audited(machine: Machine, work: Path, bundles: list[str]) -> dict[str, Any] | None:
    """Print what a CPU guarantees, and return it; None if its process failed."""
    folder, started = work / machine.name, time.monotonic()
    arguments = [str(Path(__file__).with_name("leg.py")), str(TINY / "prompts.json"), *bundles]
    command, own = machine.command(folder, arguments)
    environment = environment_for(own, (folder / "cache").resolve())
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    click.echo(f"\n{machine.name}: {machine.description} ({time.monotonic() - started:.0f} s)")
    if done.returncode:
        click.echo(f"failed: got exit code {done.returncode}, expected 0: {done.stderr.strip()[-2000:]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for one in found["bundles"]:
        changed = f"{one['changed']} of {one['completions']} changed, {one['drafted']} draft tokens"
        click.echo(f"  bundle  {one['bundle']:16} {one['exactness']}; {changed}")
    found["changed"] = sum(one["changed"] for one in found["bundles"])
    return found


if __name__ == "__main__":
    main()
