"""Checkpoint source: the configuration, tokenizer and generation config of a checkpoint folder or GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spaceport.exporter.checkpoint_files import is_converted, is_gguf, load_with_own_attention, require_checkpoint
from spaceport.exporter.converted_checkpoint import ConvertedCheckpoint, converted_config, open_converted
from spaceport.exporter.converted_tokenizer import published_tokenizer
from spaceport.exporter.gguf_checkpoint import gguf_config
from spaceport.exporter.gguf_file import GgufFile, read_gguf
from spaceport.exporter.gguf_tokenizer import end_tokens, gguf_tokenizer
from spaceport.exporter.sar_config import CheckpointError, read_json
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.decoder import freeze_rotary


@dataclass(frozen=True)
class CheckpointSource:
    """What a folder or file holds besides weights and adapters."""

    config: PreTrainedConfig
    tokenizer: Any
    generation: dict[str, Any]
    gguf: GgufFile | None = None
    converted: ConvertedCheckpoint | None = None


def reason_of(error: BaseException) -> str:
    """The first line of a library's error message, or the first two if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text


def template_of(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer, the default one of several; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _generation(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def _tokenizer(folder: Path, remote_code: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be read: {reason_of(error)}: expected one as save_pretrained writes it"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no fast version: expected a tokenizer that can be saved as tokenizer.json"
        )
    return tokenizer


def _config(folder: Path, remote_code: bool) -> PreTrainedConfig:
    file = folder / "config.json"
    content = read_json(file)
    kind = content.get("model_type")
    if not (isinstance(kind, str) and kind in CONFIG_MAPPING) and not remote_code:
        own_code = "it has its own code: use --trust-remote-code if you trust it"
        raise CheckpointError(
            f"{file}: architecture {kind!r} is not one that transformers {transformers.__version__} knows: "
            + (
                own_code
                if "auto_map" in content
                else "expected one such as llama, qwen3 or mistral, or a newer transformers"
            )
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # each model family raises its own exception types
        raise CheckpointError(f"{file}: {reason_of(error)}: expected a configuration of {kind!r}") from error
    remote = remote_code and "AutoModelForCausalLM" in (content.get("auto_map") or {})
    if config.is_encoder_decoder or (kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote):
        raise CheckpointError(
            f"{file}: {kind!r} is not a decoder-only causal language model: expected one such as llama, qwen3 or mistral"
        )
    return cast(PreTrainedConfig, config)


def _with_published_ends(named: Any, published: tuple[int, ...]) -> list[Any]:
    """The end-of-text ids of a generation config, and those with which the original code ends an answer."""
    own = named if isinstance(named, list) else [] if named is None else [named]
    return list(dict.fromkeys([*own, *published]))


def model_config(path: Path, remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a GGUF file's or a checkpoint folder's model; the folder may lack weights and tokenizer."""
    if is_gguf(path):
        return gguf_config(read_gguf(path))
    return converted_config(path) if is_converted(path) and not remote_code else _config(path, remote_code)


def read_source(folder: Path, remote_code: bool) -> CheckpointSource:
    """The configuration, tokenizer and generation config of a GGUF file or of a checkpoint folder."""
    if is_gguf(folder):
        gguf = read_gguf(folder)
        return CheckpointSource(gguf_config(gguf), gguf_tokenizer(gguf), {"eos_token_id": end_tokens(gguf)}, gguf=gguf)
    require_checkpoint(folder)
    if remote_code or not is_converted(folder):
        return CheckpointSource(_config(folder, remote_code), _tokenizer(folder, remote_code), _generation(folder))
    generation, converted = _generation(folder), open_converted(folder)
    published = published_tokenizer(folder, converted.published_type, generation)
    generation = {**generation, "eos_token_id": _with_published_ends(generation.get("eos_token_id"), published.end)}
    return CheckpointSource(converted.config, published.tokenizer, generation, converted=converted)


def model_without_values(config: PreTrainedConfig, dtype: Precision) -> PreTrainedModel:
    """The model of a configuration on the meta device, with frozen rotary frequencies."""

    def build(attn_implementation: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=getattr(torch, dtype)
        )
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # others choose experts by values
        return model, {}

    with torch.device("meta"), torch.no_grad():
        model, _ = load_with_own_attention(build)
    freeze_rotary(model)
    return cast(PreTrainedModel, model.eval())
