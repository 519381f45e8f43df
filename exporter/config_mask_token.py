"""Configuration mask token: the mask token that config.json names, as in checkpoints of PARD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spaceport.exporter.sar_config import CheckpointError, read_json
from spaceport.graphs.contract.json_fields import is_whole

MASK_ENTRIES = ("pard_token", "ptd_token_id", "mask_token_id")

# Entries of methods that draft in another way, which a checkpoint may have beside a mask token:
_OTHER_METHODS = (
    *("block_size", "dlm_type", "dlm_paradigm"),  # block diffusion: the mask rows of a block see each other
    *("pard2", "pard2_target_dim", "spd_type"),  # PARD-2 takes hidden states of another model
    *("dflash_config", "dspark_noise_token_id", "speculators_model_type", "target_layer_ids", "draft_vocab_size"),
)


class MaskEntry(NamedTuple):
    """A mask token in config.json."""

    name: str  # of the entry
    token: int


def other_method(config: Mapping[str, Any]) -> str | None:
    """The first entry of a configuration by which its mask rows are not those of PARD."""
    return next((name for name in _OTHER_METHODS if config.get(name)), None)


def mask_entry(file: Path, config: Mapping[str, Any]) -> MaskEntry | None:
    """The mask token that a configuration names, whatever the method."""
    for name in MASK_ENTRIES:
        token = config.get(name)
        if token is None:
            continue
        if not is_whole(token, 0):
            raise CheckpointError(f"{file}: {name} is {token!r}: expected a token id")
        return MaskEntry(name, token)
    return None


def config_mask_token(folder: Path, vocab: int) -> int | None:
    """The mask token in a checkpoint's config.json, if its mask rows are those of PARD: causal, and with shift."""
    file = folder / "config.json"
    if not file.exists():  # a GGUF file, or an adapter folder
        return None
    config = read_json(file)
    found = None if other_method(config) else mask_entry(file, config)
    if found is not None and found.token >= vocab:
        raise CheckpointError(
            f"{file}: {found.name} is {found.token}, the model's vocabulary ends at {vocab - 1}: expected an id within it"
        )
    return None if found is None else found.token
