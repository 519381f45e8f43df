"""Peft configuration: the file adapter_config.json of an adapter, with what a gated adapter can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft import LoraConfig

from spaceport.exporter.sar_config import CheckpointError, read_json
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.tools.adopt.given import PEFT_FILE

WEIGHTS_FILE = "adapter_model.safetensors"

# Entries that determine which modules have an adapter, and how its output is scaled.
_USED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
# Entries without effect on the result.
_NOTES = (
    *(
        "peft_type",
        "task_type",
        "inference_mode",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "peft_version",
    ),
    *("lora_dropout", "init_lora_weights", "runtime_config", "loftq_config", "megatron_config", "megatron_core"),
)
_REASONS = {
    "use_dora": "DoRA scales the base weights, also for other rows",
    "fan_in_fan_out": "its weights are transposed, as in Conv1D modules, which cannot have gated adapters",
    "bias": "trained biases would act on all rows",
    "modules_to_save": "whole modules would act on all rows",
    "lora_bias": "a gated adapter has no bias",
    "trainable_token_indices": "trained embeddings are not taken over",
    "layer_replication": "the model would have other layers than its base",
    "target_parameters": "only linear modules can have gated adapters",
    "alora_invocation_tokens": "it is active after an invocation, not on mask rows",
}
# Initializations that leave the base weights as they are; the others subtract the initial adapter from them.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_ADVICE = "expected a LoRA adapter that was trained on frozen base weights"


def read_peft_config(folder: Path) -> tuple[LoraConfig, str | None]:
    """The LoRA configuration of an adapter folder, and the name of its base model; raises for what cannot be gated."""
    _require_weights(folder)
    file = folder / PEFT_FILE
    entries = read_json(file)
    kind = entries.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}: expected LORA, which can act on mask rows only")
    _refuse_others(file, entries)
    _check_values(file, entries)
    base = entries.get("base_model_name_or_path")
    chosen: dict[str, Any] = {name: entries[name] for name in _USED if entries.get(name) is not None}
    try:
        config = LoraConfig(**chosen, init_lora_weights=False)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(f"{file}: peft refuses it: {reason}: copy the adapter folder again") from error
    return config, base if isinstance(base, str) else None


def _require_weights(folder: Path) -> None:
    if not (folder / PEFT_FILE).is_file():
        raise CheckpointError(f"{folder}: no {PEFT_FILE} in it: expected an adapter folder as peft writes it")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = any(folder.glob("adapter_model*.bin"))
        raise CheckpointError(
            f"{folder}: "
            + ("its weights are pickles, which can run code when opened" if pickled else f"no {WEIGHTS_FILE} in it")
            + f": expected {WEIGHTS_FILE}; save the adapter again with save_pretrained"
        )


def _refuse_others(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise for an entry that changes more than the output of linear modules on mask rows."""
    usual = vars(LoraConfig())
    known = {each.name for each in fields(LoraConfig)}
    for name, value in entries.items():
        if name in (*_USED, *_NOTES) or value in (None, False, [], {}) or value == usual.get(name):
            continue
        reason = _REASONS.get(name, "it is not known how" if name not in known else "gated adapters cannot have it")
        raise CheckpointError(f"{file}: {name} is {value!r}, which is not supported: {reason}; {_ADVICE}")
    start = entries.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {start!r}, which is not supported: it changes the base weights; {_ADVICE}, or one "
            "that peft converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )


def _check_values(file: Path, entries: Mapping[str, Any]) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(entries.get(name) or {}, dict):
            raise CheckpointError(f"{file}: {name} is {entries[name]!r}: expected an object with names of modules")
    ranks = {"r": entries.get("r"), **(entries.get("rank_pattern") or {})}
    for name, rank in ranks.items():
        if not is_whole(rank, 1):
            raise CheckpointError(f"{file}: rank {name} is {rank!r}: expected a whole number of at least 1")
    alphas = {"lora_alpha": entries.get("lora_alpha"), **(entries.get("alpha_pattern") or {})}
    for name, alpha in alphas.items():
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not number or not 0 < alpha < float("inf"):
            raise CheckpointError(f"{file}: {name} is {alpha!r}: expected a number above 0")
    if not entries.get("target_modules"):
        raise CheckpointError(f"{file}: target_modules is {entries.get('target_modules')!r}: expected names of modules")
