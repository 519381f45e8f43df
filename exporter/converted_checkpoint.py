"""A published folder of a family that transformers does not ship, opened as one that it ships.

Nothing is written: names and shapes are checked when the folder is opened, and the weights are read into the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from spaceport.exporter.checkpoint_files import (
    INDEX_FILE,
    ModelFiles,
    converted_weights,
    indexed_files,
    load_with_own_attention,
)
from spaceport.exporter.converted_families import FAMILIES, Family, Fields
from spaceport.exporter.mechanisms import read_pickled_tensors, read_tensors
from spaceport.exporter.sar_config import CheckpointError

Shape = tuple[int, ...]

# Tables that the original code computes from the configuration and stored with the weights.
_COMPUTED = re.compile(
    r"(.+\.)?(rotary_emb|rotary_pos_emb)\.inv_freq|transformer\.h\.\d+\.attn\.(masked_bias|logn_tensor)"
)
_INDEX = {".safetensors": INDEX_FILE, ".bin": "pytorch_model.bin.index.json"}
_ADVICE = "copy or download it again"


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of a published checkpoint: the rows of one weight of the converted model, or of several."""

    name: str
    weights: Mapping[str, Shape]  # by name, from the first row to the last
    copy_of: str | None = None  # of a tied head: it may be missing, or has the values of this tensor

    @property
    def shape(self) -> Shape:
        shapes = list(self.weights.values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def slices(self) -> Iterator[tuple[str, slice]]:
        """The weights in this tensor, each with its rows."""
        start = 0
        for weight, shape in {} if self.copy_of is not None else self.weights.items():
            yield weight, slice(start, start + shape[0])
            start += shape[0]


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A published checkpoint without its weights."""

    files: ModelFiles
    published_type: str  # model_type in config.json
    config: PreTrainedConfig  # of the converted model


def published_tensors(family: Family, config: PreTrainedConfig) -> tuple[PublishedTensor, ...]:
    """The tensors of a published checkpoint, with the weights of the converted model that they hold."""

    def published_name(weight: str) -> str:
        for name, published in family.names.items():
            weight = weight.replace(name, published)
        return weight

    with torch.device("meta"):
        weights = family.model(config).state_dict()
    shapes: dict[str, dict[str, Shape]] = {}
    for weight, value in weights.items():
        shapes.setdefault(published_name(weight), {})[weight] = tuple(value.shape)
    head, embeddings = (published_name(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    tied = {head: embeddings} if config.tie_word_embeddings else {}
    return tuple(PublishedTensor(name, parts, tied.get(name)) for name, parts in shapes.items())


def check_tensors(owner: object, expected: Iterable[PublishedTensor], shapes: Mapping[str, Shape]) -> None:
    """Raise for missing and wrongly shaped tensors, and for those that no weight is made from."""
    by_name = {tensor.name: tensor for tensor in expected}
    missing = [name for name, tensor in by_name.items() if name not in shapes and tensor.copy_of is None]
    if missing:
        raise CheckpointError(
            f"{owner}: tensor {_some(missing)} missing: expected the {len(by_name)} tensors that config.json describes; copy "
            "or download the checkpoint again"
        )
    unused = [name for name in shapes if name not in by_name and not _COMPUTED.fullmatch(name)]
    if unused:
        raise CheckpointError(
            f"{owner}: tensor {_some(sorted(unused))} unknown: expected the {len(by_name)} tensors that config.json describes, "
            "and no adapters, prefixes or quantized weights; merge or dequantize them with the software that wrote them"
        )
    for name, tensor in by_name.items():
        if name in shapes and shapes[name] != tensor.shape:
            raise CheckpointError(
                f"{owner}: tensor {name} has shape {shapes[name]}: expected {tensor.shape} from config.json; copy or download "
                "the checkpoint again"
            )


def _some(names: list[str]) -> str:
    """The first names of a list, with the verb that follows them."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} {'are' if more else 'is'}"


def read_state(files: ModelFiles) -> dict[str, Tensor]:
    """The tensors of a published checkpoint folder by name: of its safetensors files, otherwise of its pickles.

    Large files are mapped into memory: their tensors are read when they are used."""
    state: dict[str, Tensor] = {}
    for file in _complete(files, converted_weights(files)):
        read = read_tensors if file.suffix == ".safetensors" else read_pickled_tensors
        tensors = read(file, _ADVICE)
        if twice := sorted(state.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: tensor {twice[0]} is in two files: expected it in one; {_ADVICE}")
        state |= tensors
    return state


def _complete(files: ModelFiles, weights: tuple[Path, ...]) -> tuple[Path, ...]:
    """The weight files that the folder's index names, or all without an index; raise if one is missing."""
    index = _INDEX[weights[0].suffix]
    if not (files.path / index).exists():
        return weights
    names = set(indexed_files(files, index))
    missing = sorted(names - {file.name for file in weights})
    if missing:
        raise CheckpointError(
            f"{files.path}: the weight file {missing[0]} is missing: expected {len(names)} files, as {index} says; copy or "
            "download it"
        )
    return tuple(file for file in weights if file.name in names)


def converted_config(files: ModelFiles) -> PreTrainedConfig:
    """The configuration of the converted model of a folder; raise if it cannot be converted exactly."""
    family = FAMILIES[files.config["model_type"]]
    fields = Fields(files.path / "config.json", files.config, family.title)
    config = family.config(fields)
    if (dtype := fields.dtype()) is not None:
        config.dtype = getattr(torch, dtype)
    return config


def open_converted(files: ModelFiles) -> ConvertedCheckpoint:
    """The published checkpoint in a folder; raise if it cannot be converted exactly, before weights are read."""
    checkpoint = ConvertedCheckpoint(files, files.config["model_type"], converted_config(files))
    _checked_state(checkpoint)
    return checkpoint


def _checked_state(checkpoint: ConvertedCheckpoint) -> tuple[tuple[PublishedTensor, ...], dict[str, Tensor]]:
    """The tensors that a checkpoint must have, and those in its files; raise if these are others."""
    expected = published_tensors(FAMILIES[checkpoint.published_type], checkpoint.config)
    state = read_state(checkpoint.files)
    check_tensors(checkpoint.files.path, expected, {name: tuple(tensor.shape) for name, tensor in state.items()})
    return expected, state


def load_converted(checkpoint: ConvertedCheckpoint, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model with the published weights, and the loading report of transformers."""
    return load_with_own_attention(
        FAMILIES[checkpoint.published_type].model.from_pretrained,
        None,
        config=checkpoint.config,
        state_dict=dict(_weights(checkpoint, dtype)),
        dtype=dtype,
        output_loading_info=True,
    )


def _weights(checkpoint: ConvertedCheckpoint, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of the converted model, each with memory of its own."""
    tensors, state = _checked_state(checkpoint)
    for tensor in tensors:
        if tensor.copy_of is not None:
            if tensor.name in state and not torch.equal(state[tensor.name], state[tensor.copy_of]):
                raise CheckpointError(
                    f"{checkpoint.files.path}: tie_word_embeddings is true, but {tensor.name} differs from {tensor.copy_of}: "
                    "expected equal tensors; set tie_word_embeddings to false if the head was trained"
                )
            continue
        values = state[tensor.name]
        if not values.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.files.path}: tensor {tensor.name} has type {values.dtype}: expected floating-point weights; "
                "download the checkpoint that is not quantized"
            )
        for weight, rows in tensor.slices():
            yield weight, values[rows].to(dtype, copy=True)
