"""The checks as a command: python -m real_clients --work build/clients."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from real_clients import evaluations, hostile, loads
from real_clients.environments import CommandFailed, environment, program, version_of
from spaceport.runtime.session import Runtime
from support.paths import DEMO
from support.running_service import RunningService, running_service

_EXPORT = "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"
Check = Callable[[RunningService, Runtime, Path, Path], list[str]]

CHECKS: dict[str, Check] = {
    "lm-eval": lambda service, runtime, programs, folder: evaluations.check(
        program(programs, "lm_eval"), service.url, runtime, folder
    ),
    "guidellm": lambda service, runtime, programs, folder: loads.guidellm(
        program(programs, "guidellm"), service.url, loads.tokenizer_folder(runtime.bundle, folder), folder
    ),
    "aiperf": lambda service, runtime, programs, folder: loads.aiperf(
        program(programs, "aiperf"), service.url, loads.tokenizer_folder(runtime.bundle, folder), folder
    ),
    "schemathesis": lambda service, runtime, programs, folder: hostile.check(
        program(programs, "schemathesis"), service.url, folder
    ),
}


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/clients"), help="Folder of environments.")
@click.option(
    "--bundle", type=click.Path(path_type=Path, exists=True), help="Bundle to serve; default: the demo model."
)
@click.option("--only", type=click.Choice(list(CHECKS)), multiple=True, help="Run these clients only.")
def main(work: Path, bundle: Path | None, only: tuple[str, ...]) -> None:
    """Run all clients, print a table, and exit with status 1 if one of them failed."""
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    served = bundle or _demo(work)
    rows, failed = [], False
    opener = partial(Runtime.open, served, max_requests=4, prefix_cache=True, threads=1, max_seq_len=480)
    with running_service({"model": opener}) as service, Runtime.open(served, threads=1, max_seq_len=480) as runtime:
        for name in only or CHECKS:
            click.echo(f"clients: {name}", err=True)
            began = time.monotonic()
            try:
                programs = environment(name, work)
                began = time.monotonic()
                found = CHECKS[name](service, runtime, programs, work / name)
            except (AssertionError, CommandFailed) as error:
                found, failed = [f"FAILED: {error}"], True
            seconds = time.monotonic() - began
            service.wait_until_idle()
            rows += [f"| {name} {version_of(name)} | {one} | {seconds:.0f} |" for one in found]
    click.echo("\n".join(["| client | what was found | seconds |", "|---|---|---:|", *rows]))
    if failed:
        raise SystemExit(1)


def _demo(work: Path) -> Path:
    """The demo model as a bundle, exported unless it is there."""
    target = work / "demo.bundle"
    if not target.exists():
        command = [sys.executable, "-c", _EXPORT, "export", str(DEMO), str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


if __name__ == "__main__":
    main()
