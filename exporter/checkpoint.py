"""Checkpoint: open and check a Hugging Face checkpoint folder before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spaceport.exporter.adapter import ADAPTER_FILE, apply_adapter, read_adapter
from spaceport.exporter.sar_config import SAR_FILE as SAR_FILE
from spaceport.exporter.sar_config import CheckpointError as CheckpointError
from spaceport.exporter.sar_config import read_json, read_sar_config
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import MAX_MASK_SLOTS, TokenIds
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.gated import Adapter

DEFAULT_MASK_SLOTS = 5  # as published for SPACE; used if a checkpoint sets only its mask token


@dataclass(frozen=True)
class TokenFlags:
    """Special tokens from the command line, by id or by text; missing ones are read from sar_config.json."""

    mask: tuple[str, ...] = ()
    fork: str | None = None
    child: str | None = None
    max_mask_slots: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights."""

    folder: Path
    config: PreTrainedConfig
    tokens: TokenIds
    max_mask_slots: int
    tokenizer: str  # content of tokenizer.json
    template: str | None  # chat template
    special_tokens: dict[str, str]
    generation: dict[str, Any]  # generation_config.json
    remote_code: bool
    adapter: Adapter | None  # for mask rows


def open_checkpoint(folder: Path, flags: TokenFlags, remote_code: bool = False) -> Checkpoint:
    """The checkpoint in a folder, with its special token ids."""
    config = _config(folder, remote_code)
    _weights(folder)
    tokenizer = _tokenizer(folder, remote_code)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    tokens, mask_slots = _tokens(folder, config, tokenizer, generation, flags)
    return Checkpoint(
        folder=folder,
        config=config,
        tokens=tokens,
        max_mask_slots=mask_slots,
        tokenizer=backend.to_str(),
        template=_template(tokenizer),
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        },
        generation=generation,
        remote_code=remote_code,
        adapter=read_adapter(folder, tokens),
    )


def load_model(checkpoint: Checkpoint, dtype: Precision) -> PreTrainedModel:
    """The model with the weights of the checkpoint, and with its adapter if it has one."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=checkpoint.remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its weights cannot be loaded: {_reason(error)}: copy or download it again"
        ) from error
    model, report = loaded
    lost = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.folder}: weights {', '.join(lost[:3])}{more} are missing or of another shape: expected every weight of "
            f"{type(model).__name__}; save the checkpoint again with save_pretrained"
        )
    if checkpoint.adapter is not None:
        apply_adapter(model, checkpoint.folder, checkpoint.tokens.mask, checkpoint.adapter)
    return cast(PreTrainedModel, model.eval())


def _config(folder: Path, remote_code: bool) -> PreTrainedConfig:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder: expected a checkpoint (config.json, *.safetensors, tokenizer)"
        )
    file = folder / "config.json"
    if not file.exists():
        raise CheckpointError(
            f"{folder}: no config.json in it: expected a checkpoint (config.json, *.safetensors, tokenizer)"
        )
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
        raise CheckpointError(f"{file}: {_reason(error)}: expected a configuration of {kind!r}") from error
    remote = remote_code and "AutoModelForCausalLM" in (content.get("auto_map") or {})
    if config.is_encoder_decoder or (kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote):
        raise CheckpointError(
            f"{file}: {kind!r} is not a decoder-only causal language model: expected one such as llama, qwen3 or mistral"
        )
    return cast(PreTrainedConfig, config)


def _weights(folder: Path) -> None:
    if any(file.name != ADAPTER_FILE for file in folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder}: its weights are pickles, which can run code when opened: expected *.safetensors; "
            "save it again with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no weights in it: expected *.safetensors")


def _tokenizer(folder: Path, remote_code: bool) -> Any:
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
    if not any((folder / name).exists() for name in known):
        raise CheckpointError(
            f"{folder}: no tokenizer in it: expected tokenizer.json, or tokenizer.model to convert from"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be read: {_reason(error)}: expected one as save_pretrained writes it"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no fast version: expected a tokenizer that can be saved as tokenizer.json"
        )
    return tokenizer


def _tokens(
    folder: Path, config: PreTrainedConfig, tokenizer: Any, generation: dict[str, Any], flags: TokenFlags
) -> tuple[TokenIds, int]:
    config_entries = read_sar_config(folder)
    vocab = int(config.get_text_config().vocab_size)
    masks = flags.mask or tuple(str(token) for token in config_entries.get("mask_tokens") or ())
    fork = flags.fork if flags.fork is not None else config_entries.get("fork_token")
    child = flags.child if flags.child is not None else config_entries.get("child_token")
    ids = TokenIds(
        mask=tuple(_token_id(token, "mask", tokenizer, vocab) for token in masks),
        fork=None if fork is None else _token_id(str(fork), "fork", tokenizer, vocab),
        child=None if child is None else _token_id(str(child), "child", tokenizer, vocab),
        end=_end_ids(config, tokenizer, generation, vocab),
    )
    if (ids.fork is None) != (ids.child is None):
        raise CheckpointError(
            "a fork token needs a child token and vice versa: set both --fork-token and --child-token"
        )
    named = [*dict.fromkeys(ids.mask), *(token for token in (ids.fork, ids.child) if token is not None), *ids.end]
    twice = sorted({token for token in named if named.count(token) > 1})
    if twice:
        raise CheckpointError(
            f"token id {twice[0]} has two of the roles mask, fork, child and end of text: expected different tokens"
        )
    return ids, _mask_slots(ids, config_entries.get("mask_slots"), flags.max_mask_slots)


def _mask_slots(ids: TokenIds, configured: Any, requested: int | None) -> int:
    """The maximum number of mask slots: as requested, else as configured, else one per mask token or the default."""
    if not ids.mask:
        if requested:
            raise CheckpointError(
                f"--max-mask-slots is {requested}, but no mask token is known: set one with --mask-token"
            )
        return 0
    distinct = len(ids.mask) > 1
    slots = (
        requested
        if requested is not None
        else configured
        if configured is not None
        else len(ids.mask)
        if distinct
        else DEFAULT_MASK_SLOTS
    )
    if not is_whole(slots, 1) or slots > MAX_MASK_SLOTS:
        raise CheckpointError(
            f"the number of mask slots is {slots!r}: expected 1 to {MAX_MASK_SLOTS} as --max-mask-slots, or as mask_slots in {SAR_FILE}"
        )
    if distinct and slots > len(ids.mask):
        raise CheckpointError(
            f"{slots} mask slots, but {len(ids.mask)} mask tokens: expected one for each mask slot, or one for all"
        )
    return slots


def _token_id(token: str, role: str, tokenizer: Any, vocab: int) -> int:
    """The id of a token given by id or by text; digits are always an id, even where a token has this text."""
    known = int(token) if token.isascii() and token.isdigit() else tokenizer.backend_tokenizer.token_to_id(token)
    if known is None:
        raise CheckpointError(
            f"{role} token {token!r} is not in the tokenizer: expected one of its tokens, or an id from 0 to {vocab - 1}"
        )
    if not 0 <= known < vocab:
        raise CheckpointError(
            f"{role} token {token!r} is id {known}, the model's vocabulary ends at {vocab - 1}: expected an id within it"
        )
    return int(known)


def _end_ids(config: PreTrainedConfig, tokenizer: Any, generation: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """The end-of-text ids of the generation config, or else of the model config, or else of the tokenizer."""
    sources: Sequence[Any] = (
        generation.get("eos_token_id"),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    found = next((value for value in sources if value is not None), ())
    ids = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    wrong = [value for value in ids if not isinstance(value, int) or not 0 <= value < vocab]
    if wrong:
        raise CheckpointError(
            f"end-of-text id {wrong[0]!r} is outside the model's vocabulary of {vocab}: correct generation_config.json"
        )
    return ids


def _template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _reason(error: BaseException) -> str:
    """The first line of a library's error message, or the first two if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text
