"""Exported: bundles of checkpoints, exported once for many runs of the suite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import Lowering
from support.cache import built
from support.paths import TINY

if TYPE_CHECKING:
    from spaceport.exporter.export import ExportOptions


def bundle_of(checkpoint: Path = TINY, options: ExportOptions | None = None) -> Path:
    """The bundle of a checkpoint, from the cache if its content, the options and the exporter have not changed."""
    # torch and transformers are imported only where a test needs a bundle
    from spaceport.exporter.checkpoint import quiet_libraries
    from spaceport.exporter.export import ExportOptions, export

    chosen = options or ExportOptions()

    def make(target: Path) -> None:
        quiet_libraries()
        export(checkpoint, target, chosen)

    made_from = (checkpoint.name, checkpoint, chosen)
    return built(f"bundle-{checkpoint.name}", made_from, make)


def bundle_in(checkpoint: Path, format_name: str, lowering: Lowering | None = None) -> Path:
    """The bundle of a checkpoint in a format."""
    from spaceport.exporter.export import ExportOptions

    return bundle_of(checkpoint, ExportOptions(FORMATS[format_name], lowering))
