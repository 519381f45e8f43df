"""`spaceport bench random`: a random model of any size without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from spaceport.graphs.contract.signature import PRECISIONS, Precision
from spaceport.tools.cli.options import PATH

if TYPE_CHECKING:
    from spaceport.graphs.decoder import AttentionImplementation


@click.command("random")
@click.argument("shape")
@click.argument("folder", type=PATH)
@click.option(
    "--format",
    "dtype",
    type=click.Choice(PRECISIONS),
    default="float16",
    show_default=True,
    help="Format of the bundle.",
)
@click.option(
    "--attention",
    type=click.Choice(("plain", "operator")),
    default="plain",
    show_default=True,
    help="Attention as matrix products, or as ONNX's operator.",
)
def command(shape: str, folder: Path, dtype: Precision, attention: AttentionImplementation) -> None:
    """Write the graph of a random Llama (SHAPE: tiny, 1b, 7b, 8b) without its weights to FOLDER.

    FOLDER has less than a megabyte. `spaceport bench steps FOLDER` draws the weights where it runs, on another machine too.
    """
    from spaceport.tools.bench.skeleton import write_skeleton

    weights = write_skeleton(shape, folder, dtype, attention)
    size = sum(file.stat().st_size for file in folder.iterdir())
    click.echo(f"{folder}: {weights / 1e9:.3f} billion weights in {size / 1e6:.2f} MB")
