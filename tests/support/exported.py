"""Exported: bundles of checkpoints, each exported once for a whole run of the suite."""

import fcntl
import os
from pathlib import Path

import pytest

from spaceport.graphs.contract.signature import Activations, Lowering, Precision, Weights
from support.paths import TINY


def exported_once(
    factory: pytest.TempPathFactory,
    lowering: Lowering,
    checkpoint: Path = TINY,
    dtype: Precision = "float32",
    weights: Weights = "same",
    activations: Activations | None = None,
) -> Path:
    """The bundle of a checkpoint with these options, exported by the first test process that needs it."""
    # torch and transformers are imported only where a test needs a bundle
    from spaceport.exporter.export import ExportOptions, export
    from spaceport.exporter.quiet import quiet_libraries

    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own within the session's
    if weights == "int8" and activations is None:
        activations = "int8x2"  # the default: one bundle for both ways to ask for it
    parts = (checkpoint.name, lowering, dtype, weights, activations)
    target = folder / "-".join(part for part in parts if part)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            quiet_libraries()
            export(checkpoint, target, ExportOptions(lowering, dtype, weights, requested_activations=activations))
    return target
