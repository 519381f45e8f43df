"""Torch file: the tensors in a file of torch.save, read without running code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from spaceport.exporter.sar_config import CheckpointError

_ADVICE = "copy the file again"


def read_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors by name in a file that holds nothing else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file}: cannot be read as tensors: {reason}: expected what torch.save writes for a dictionary of tensors; {_ADVICE}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{file}: holds {type(content).__name__}: expected a dictionary of tensors; {_ADVICE}")
    return cast(dict[str, Tensor], content)
