"""GGUF checkpoint: configuration and weights of a GGUF file, dequantized by transformers."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from spaceport.exporter.checkpoint_files import load_with_own_attention
from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.gguf_hyperparameters import check_shapes, hyperparameters_of
from spaceport.exporter.sar_config import CheckpointError


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a GGUF file's model; raise if it does not fit the file's tensors."""
    found = hyperparameters_of(file)
    check_shapes(file, found)
    try:
        config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except Exception as error:  # each model family raises its own exception types
        raise CheckpointError(
            f"{file.path}: its metadata cannot be loaded ({_line(error)}): expected that of a {file.architecture} model; "
            "convert the model again"
        ) from error
    config.head_dim = found.head_dim  # transformers has its own default
    return cast(PreTrainedConfig, config)


def load_gguf_weights(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model with dequantized weights and the loading report of transformers; no quantizer is left in it."""
    quiet: Any = modeling_gguf_pytorch_utils
    quiet.tqdm = _without_progress
    model, report = load_with_own_attention(
        AutoModelForCausalLM.from_pretrained,
        file.path.parent,
        gguf_file=file.path.name,
        config=config,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by name
    )
    remove_quantizer(model)
    _check_all_used(file, model)
    return model, report


def remove_quantizer(model: PreTrainedModel) -> None:
    """Remove what marks a model as quantized: its weights are dequantized, and it could not be saved or trained."""
    for name in ("hf_quantizer", "quantization_method", "_is_quantized", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _check_all_used(file: GgufFile, model: PreTrainedModel) -> None:
    """Raise for tensors that transformers ignored, such as RoPE factors."""
    mapper: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    used: dict[str, str] = get_gguf_hf_weights_map(model, mapper(config=model.config.to_dict()))
    ignored = sorted(file.tensors.keys() - used.keys())
    if ignored:
        raise CheckpointError(
            f"{file.path}: tensor {ignored[0]} has no counterpart in {type(model).__name__}: expected none but its weights; "
            "export the original checkpoint"
        )


def _without_progress(items: Any, **options: Any) -> Any:
    """Stands in for the progress bar of transformers' GGUF loader, which no setting turns off."""
    return items


def _line(error: Exception) -> str:
    """The message of an error on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:199]}…"
