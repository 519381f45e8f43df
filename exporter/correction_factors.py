"""Correction factors: the file of a checkpoint or adapter folder with its draft correction, and the tables made from it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from spaceport.exporter.checkpoint_files import FACTORS_FILE as FACTORS_FILE
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.tensor_file import read_tensors, save_tensors
from spaceport.graphs.contract.draft_correction import CORRECTION_FILE, CorrectionTables, write_tables
from spaceport.graphs.correction import Factors
from spaceport.graphs.streamed_weights import values_of

_ADVICE = "copy the file that belongs to this folder, or remove it to go on without a draft correction"


def read_factors(folder: Path) -> Factors | None:
    """The factors in a folder, or None if it has none."""
    file = folder / FACTORS_FILE
    if not file.exists():
        return None
    found = read_tensors(file, _ADVICE)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    before, after = (found.get(name) for name in Factors._fields)
    if len(found) != 2 or before is None or after is None or before.dim() != 2 or before.shape != after.shape:
        raise CheckpointError(
            f"{file}: has tensors with the shapes {shapes}: expected before and after, H x rank: {_ADVICE}"
        )
    if not (torch.isfinite(before).all() and torch.isfinite(after).all()):
        raise CheckpointError(f"{file}: has numbers that are not finite: {_ADVICE}")
    return Factors(before.float(), after.float())


def check_factors(folder: Path, factors: Factors, embeddings: nn.Embedding) -> None:
    """Raise if factors are not those of a model with these token embeddings."""
    found, expected = factors.before.shape[0], embeddings.weight.shape[1]
    if found != expected:
        raise CheckpointError(
            f"{folder / FACTORS_FILE}: is for embeddings of size {found}: expected {expected}, that of the model: {_ADVICE}"
        )


def write_factors(folder: Path, factors: Factors) -> None:
    """Write factors into a folder."""
    save_tensors(folder / FACTORS_FILE, {name: tensor.half() for name, tensor in factors._asdict().items()})


def write_correction(bundle: Path, factors: Factors, embeddings: nn.Embedding, vocab_size: int) -> None:
    """Write the tables of a model's draft correction into a bundle's folder; tokens without an embedding have none."""
    missing = max(0, vocab_size - embeddings.weight.shape[0])
    before, after = (
        nn.functional.pad(table[:vocab_size], (0, 0, 0, missing)).half().numpy()
        for table in factors.tables(values_of(embeddings.weight))
    )
    with (bundle / CORRECTION_FILE).open("wb") as file:
        write_tables(file, CorrectionTables(before, after))
