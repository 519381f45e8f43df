"""GGUF file: the metadata of a llama.cpp model file, checked for everything that cannot be loaded exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.exporter.gguf_layout import check_layout
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.installation import install_command

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # those whose logits the tests compare with the original model
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
_PACKAGES = ("gguf", "accelerate")  # transformers needs both to load a GGUF file
_HEAD_DIM_KEYS = ("attention.key_length", "attention.value_length")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor without its data."""

    kind: str  # name of its type
    shape: tuple[int, ...]  # innermost dimension first


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file without its tensor data."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]  # arrays included
    tensors: Mapping[str, GgufTensor]  # by name

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value below `tokenizer.ggml.`."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file; raise if its model cannot be loaded exactly."""
    require_checkpoint(path)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{path}: loading GGUF files needs the package {missing[0]}, which is not installed: "
            f"{install_command('gguf')}"
        )
    file = _read(path)
    _check_architecture(file)
    _check_tensors(file)
    _check_metadata(file)
    return file


def _read(path: Path) -> GgufFile:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    check_layout(path, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            tensor.name: GgufTensor(tensor.tensor_type.name, tuple(map(int, tensor.shape))) for tensor in reader.tensors
        }
    except Exception as error:  # numpy and the package raise many types
        raise CheckpointError(
            f"{path}: not a valid GGUF file ({error}): expected version 2 or 3; download or convert it again"
        ) from error
    return GgufFile(path, str(metadata.get("general.architecture")), metadata, tensors)


def _check_architecture(file: GgufFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type is {kind!r}: expected a model")
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file.path}: one of {parts!r} parts: expected a single file; merge them with llama-gguf-split --merge"
        )
    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture!r} is not supported in GGUF files: expected one of "
            f"{', '.join(ARCHITECTURES)}; export the original checkpoint"
        )


def _check_tensors(file: GgufFile) -> None:
    for name, tensor in file.tensors.items():
        if tensor.kind not in TENSOR_TYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has type {tensor.kind}, which is not supported: expected one of "
                f"{', '.join(TENSOR_TYPES)}; quantize the model to another type"
            )


def _check_metadata(file: GgufFile) -> None:
    """Raise for hyperparameters that transformers ignores, such as RoPE scaling."""
    mapping: Any = GGUF_CONFIG_MAPPING
    known = {*mapping[file.architecture], *_HEAD_DIM_KEYS}
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{file.architecture}.")
        if name != key and name not in known and (name, value) != ("rope.scaling.type", "none"):
            raise CheckpointError(
                f"{file.path}: {key} is {_shown(value)}, which cannot be loaded from GGUF files: expected a model without it; "
                "export the original checkpoint"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
