"""Input rows file: the file of a checkpoint or adapter folder with input embeddings of single tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from spaceport.exporter.checkpoint_files import INPUT_ROWS_FILE as INPUT_ROWS_FILE
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.tensor_file import read_tensors, save_tensors
from spaceport.graphs.input_rows import InputRows

_NAMES = {"ids", "rows"}
_ADVICE = "copy the file that belongs to this folder"


def read_input_rows(folder: Path) -> InputRows | None:
    """The input rows in a folder, or None if it has none."""
    file = folder / INPUT_ROWS_FILE
    if not file.exists():
        return None
    found = read_tensors(file, _ADVICE)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if found.keys() != _NAMES or shapes["ids"] != shapes["rows"][:1] or found["rows"].dim() != 2:
        raise CheckpointError(
            f"{file}: has tensors with the shapes {shapes}: expected ids, N, and rows, N x H: {_ADVICE}"
        )
    ids, rows = found["ids"], found["rows"].float()
    if ids.is_floating_point() or len(set(ids.tolist())) < len(ids):
        raise CheckpointError(f"{file}: has the ids {ids.tolist()[:8]}: expected whole numbers, each once: {_ADVICE}")
    if not torch.isfinite(rows).all():
        raise CheckpointError(f"{file}: has numbers that are not finite: {_ADVICE}")
    return InputRows(tuple(ids.tolist()), rows)


def check_input_rows(folder: Path, given: InputRows, embeddings: nn.Embedding) -> None:
    """Raise if input rows are not those of a model with these token embeddings."""
    tokens, hidden = embeddings.weight.shape
    if given.rows.shape[1] != hidden or not all(0 <= token < tokens for token in given.tokens):
        raise CheckpointError(
            f"{folder / INPUT_ROWS_FILE}: has rows of size {given.rows.shape[1]} for the ids {list(given.tokens)[:8]}: "
            f"expected size {hidden} and ids below {tokens}, those of the model: {_ADVICE}"
        )


def write_input_rows(folder: Path, given: InputRows) -> None:
    """Write input rows into a folder."""
    save_tensors(folder / INPUT_ROWS_FILE, {"ids": torch.tensor(given.tokens), "rows": given.rows.float()})
