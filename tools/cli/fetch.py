"""`spaceport fetch`: copy a bundle from an address into a folder, and verify it while it arrives."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.tools.cli.options import PATH, json_option, overwrite_option, require_signature_option
from spaceport.tools.fetch.fetching import MOST_CONNECTIONS, fetch
from spaceport.tools.terminal.screen import show_json, size, stages


@click.command("fetch")
@click.argument("address")
@click.argument("folder", type=PATH)
@overwrite_option("bundle that differs")
@require_signature_option
@click.option("--engines", is_flag=True, help="Also fetch the TensorRT engines of the bundle.")
@click.option(
    "--connections",
    type=click.IntRange(1, MOST_CONNECTIONS),
    default=8,
    show_default=True,
    metavar="N",
    help="Parts of 16 MiB that are read at a time.",
)
@json_option("the result")
def command(
    address: str,
    folder: Path,
    overwrite: bool,
    require_signature: Path | None,
    engines: bool,
    connections: int,
    as_json: bool,
) -> None:
    """Make FOLDER a verified copy of the bundle at ADDRESS: https://…, s3://…, gs://…, az://…, or a folder.

    The files that the manifest lists are verified while they arrive, and FOLDER is replaced in one step at the end.
    What FOLDER or an interrupted attempt has already is not fetched again. Commands that run a bundle never fetch.
    """
    with stages() as on_stage:
        report = fetch(
            address,
            folder,
            overwrite=overwrite,
            require_signature=require_signature,
            engines=engines,
            connections=connections,
            on_stage=on_stage,
        )
    if as_json:
        show_json(report.as_dict())
    elif report.unchanged:
        click.echo(f"{folder}: has the bundle already ({size(report.total_bytes)})")
    else:
        reused = f", {size(report.reused_bytes)} were there" if report.reused_bytes else ""
        click.echo(f"{folder}: {size(report.fetched_bytes)} fetched in {report.seconds:.1f} s{reused}")
