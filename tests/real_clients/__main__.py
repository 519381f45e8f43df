"""The checks as a command: python -m real_clients --work build/clients."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import click

from real_clients.clients import CLIENTS
from real_clients.environments import CommandFailed, environment, version_of
from spaceport.runtime.session import Runtime
from support.chat_runtime import running_service
from support.exported import bundle_of
from support.paths import DEMO


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/clients"), help="Folder of environments.")
@click.option("--only", type=click.Choice(list(CLIENTS)), multiple=True, help="Run these clients only.")
def main(work: Path, only: tuple[str, ...]) -> None:
    """Run all clients, print a table, and exit with status 1 if one of them failed."""
    work = work.absolute()
    os.environ["HF_HUB_OFFLINE"] = "1"
    served = bundle_of(DEMO)
    rows, failed = ["| client | what was found | seconds |", "|---|---|---:|"], False
    opener = partial(Runtime.open, served, max_requests=4, prefix_cache=True, threads=1, max_seq_len=480)
    with running_service({"model": opener}) as service, Runtime.open(served, threads=1, max_seq_len=480) as runtime:
        for name in only or CLIENTS:
            click.echo(f"clients: {name}", err=True)
            (folder := work / name).mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            try:
                programs = environment(name, work)
                began = time.monotonic()
                found = CLIENTS[name](programs, service.url, runtime, folder)
            except (AssertionError, CommandFailed) as error:
                found, failed = [f"FAILED: {error}"], True
            seconds = time.monotonic() - began
            service.wait_until_idle()
            rows += [f"| {name} {version_of(name)} | {one} | {seconds:.0f} |" for one in found]
    click.echo("\n".join(rows))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
