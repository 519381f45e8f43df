"""Converted checkpoint: a published folder of a family that transformers does not ship, opened as one that it ships.

Nothing is written: names and shapes are checked when the folder is opened, and the weights are read into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GlmForCausalLM,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from spaceport.exporter.checkpoint_files import CONVERTED_TYPES, load_with_own_attention
from spaceport.exporter.converted_chatglm import chatglm_config, chatglm_layout
from spaceport.exporter.converted_fields import Fields
from spaceport.exporter.converted_internlm import internlm_config, internlm_layout
from spaceport.exporter.converted_layout import Source, check_tensors
from spaceport.exporter.converted_nemotron import nemotron_config, nemotron_layout
from spaceport.exporter.converted_qwen import qwen_config, qwen_layout
from spaceport.exporter.converted_tensor_files import TensorFiles, open_tensors
from spaceport.exporter.sar_config import CheckpointError, read_json


@dataclass(frozen=True)
class Family:
    """A published family: how its configuration and its tensors are converted."""

    title: str
    config: Callable[[Fields], PreTrainedConfig]
    layout: Callable[[PreTrainedConfig], Iterator[Source]]
    model: type[PreTrainedModel]  # of the converted checkpoint


FAMILIES = {
    "chatglm": Family("ChatGLM3", chatglm_config, chatglm_layout, GlmForCausalLM),
    "internlm": Family("InternLM v1", internlm_config, internlm_layout, LlamaForCausalLM),
    "nemotron_labs_diffusion": Family(
        "Nemotron-Labs-Diffusion", nemotron_config, nemotron_layout, Ministral3ForCausalLM
    ),
    "qwen": Family("Qwen v1", qwen_config, qwen_layout, Qwen2ForCausalLM),
}
assert set(FAMILIES) == set(CONVERTED_TYPES)


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A published checkpoint without its weights."""

    folder: Path
    published_type: str  # model_type in config.json
    config: PreTrainedConfig  # of the converted model


def converted_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the converted model of a folder; raise if it cannot be converted exactly."""
    file = folder / "config.json"
    content = read_json(file)
    family = FAMILIES[content["model_type"]]
    fields = Fields(file, content, family.title)
    config = family.config(fields)
    if (dtype := fields.dtype()) is not None:
        config.dtype = getattr(torch, dtype)
    return config


def open_converted(folder: Path) -> ConvertedCheckpoint:
    """The published checkpoint in a folder; raise if it cannot be converted exactly, before weights are read."""
    config = converted_config(folder)
    published_type = read_json(folder / "config.json")["model_type"]
    with open_tensors(folder) as tensors:
        check_tensors(folder, FAMILIES[published_type].layout(config), tensors.shapes)
    return ConvertedCheckpoint(folder, published_type, config)


def load_converted(checkpoint: ConvertedCheckpoint, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model with the published weights, and the loading report of transformers."""
    family = FAMILIES[checkpoint.published_type]
    layout = tuple(family.layout(checkpoint.config))
    with open_tensors(checkpoint.folder) as tensors:
        check_tensors(checkpoint.folder, layout, tensors.shapes)
        state = dict(_weights(checkpoint.folder, layout, tensors, dtype))
    return load_with_own_attention(
        family.model.from_pretrained,
        None,
        config=checkpoint.config,
        state_dict=state,
        dtype=dtype,
        output_loading_info=True,
    )


def _weights(
    folder: Path, layout: tuple[Source, ...], tensors: TensorFiles, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the converted model, each with memory of its own."""
    for source in layout:
        if source.copy_of is not None:
            _check_copy(folder, source, tensors)
            continue
        tensor = tensors.read(source.name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}: tensor {source.name} has type {tensor.dtype}: expected floating-point weights; download the "
                "checkpoint that is not quantized"
            )
        for weight, rows in source.slices():
            yield weight, tensor[rows].to(dtype, copy=True)


def _check_copy(folder: Path, source: Source, tensors: TensorFiles) -> None:
    """Raise if a tied head has other values than the embeddings."""
    if source.name in tensors.shapes and not torch.equal(tensors.read(source.name), tensors.read(str(source.copy_of))):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true, but {source.name} differs from {source.copy_of}: expected equal "
            "tensors; set tie_word_embeddings to false if the head was trained"
        )
