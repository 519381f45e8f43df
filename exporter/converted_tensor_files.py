"""Tensor files: the tensors of a published checkpoint, in safetensors files or in pickles that hold tensors only."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spaceport.exporter.checkpoint_files import converted_weights
from spaceport.exporter.converted_layout import Shape
from spaceport.exporter.sar_config import CheckpointError, read_json

_INDEX = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
_ADVICE = "copy or download it again"


@dataclass(frozen=True)
class TensorFiles:
    """Opened weight files. Tensors are read when they are asked for, and large files are mapped into memory."""

    shapes: dict[str, Shape]  # by tensor name
    files: dict[str, Any]  # the opened file of each tensor: a safetensors handle, or the tensors of a pickle

    def read(self, name: str) -> Tensor:
        file = self.files[name]
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFiles]:
    """The tensors of a published checkpoint folder: of its safetensors files, otherwise of its pickles."""
    opened = TensorFiles({}, {})
    with ExitStack() as stack:
        for file in _complete(folder, converted_weights(folder)):
            tensors = _safetensors(file, stack) if file.suffix == ".safetensors" else _pickled(file)
            for name, (shape, owner) in tensors.items():
                if name in opened.shapes:
                    raise CheckpointError(f"{file}: tensor {name} is in two files: expected it in one; {_ADVICE}")
                opened.shapes[name], opened.files[name] = shape, owner
        yield opened


def _complete(folder: Path, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files that the folder's index names, or all without an index; raise if one is missing."""
    index = folder / _INDEX[files[0].suffix]
    if not index.exists():
        return files
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{index}: weight_map is invalid: expected the file of each tensor; {_ADVICE}")
    missing = sorted(set(named.values()) - {file.name for file in files})
    if missing:
        raise CheckpointError(
            f"{folder}: the weight file {missing[0]} is missing: expected {len(set(named.values()))} files, as {index.name} "
            "says; copy or download it"
        )
    return tuple(file for file in files if file.name in named.values())


def _safetensors(file: Path, stack: ExitStack) -> dict[str, tuple[Shape, Any]]:
    try:
        opened = stack.enter_context(safe_open(file, "pt"))
        return {name: (tuple(opened.get_slice(name).get_shape()), opened) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {_ADVICE}") from error


def _pickled(file: Path) -> dict[str, tuple[Shape, Any]]:
    """The tensors of a pickle; anything but tensors in it is refused, so no code in it is run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"{file}: cannot be read as a file of tensors: {reason}: expected tensors only; {_ADVICE}, preferably as *.safetensors"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and type(tensor) in (Tensor, torch.nn.Parameter) for name, tensor in content.items()
    ):
        raise CheckpointError(f"{file}: holds {type(content).__name__}: expected tensors by name; {_ADVICE}")
    return {name: (tuple(tensor.shape), content) for name, tensor in content.items()}
