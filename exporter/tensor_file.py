"""Tensor file: a safetensors file of a checkpoint or adapter folder, read with an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.sar_config import CheckpointError


def read_tensors(file: Path, advice: str) -> dict[str, Tensor]:
    """The tensors in a file; the error of one that cannot be read ends with the advice."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {advice}") from error


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file that everybody may read; safetensors itself makes it readable by its owner only."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(0o644)
