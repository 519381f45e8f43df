"""Sar_config: what the JSON files of a folder say about its drafts: special tokens, layout, method and rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.draft_methods import (
    GROUPS,
    DraftAcceptance,
    MaskLayout,
    draft_acceptances,
    with_acceptance,
)
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole

SAR_FILE = "sar_config.json"

# Entries of earlier versions for what is in `mechanisms` now.
_EARLIER = {"mask_adapter", "heads", "prefix"}
_ENTRIES = (
    *("mask_tokens", "mask_slots", "fork_token", "child_token", "fork_by_default"),
    *("shift", "group", "noise"),  # how mask slots draft
    *("mechanisms", "method", "adapter"),
    "acceptance",
)
MASK_ENTRIES = ("pard_token", "ptd_token_id", "mask_token_id")
# Entries of methods that draft in another way, which a checkpoint may have beside a mask token:
_OTHER_METHODS = (
    *("block_size", "dlm_type", "dlm_paradigm"),  # block diffusion: the mask rows of a block see each other
    *("pard2", "pard2_target_dim", "spd_type"),  # PARD-2 takes hidden states of another model
    *("dflash_config", "dspark_noise_token_id", "speculators_model_type", "target_layer_ids", "draft_vocab_size"),
)
PARD = "pard"  # the method of a checkpoint whose config.json names its mask token
_ORIGIN = ("method", "adapter")
_ORIGIN_LENGTH = 200  # characters of an entry


class CheckpointError(InputFault):
    """A folder that cannot be exported; the message states what was found, what was expected and what to do."""


def is_id(token: str) -> bool:
    """Whether a special token is named by its id instead of its text."""
    return token.isascii() and token.isdigit()


def read_sar_config(folder: Path) -> dict[str, Any]:
    """The entries of a folder's sar_config.json; empty if the file does not exist."""
    file = folder / SAR_FILE
    if not file.exists():
        return {}
    entries = read_json(file)
    unknown = sorted(set(entries) - set(_ENTRIES))
    if unknown:
        older = "; export, tune or adopt again what an earlier version wrote" if _EARLIER & set(unknown) else ""
        raise CheckpointError(f"{file}: unknown entries {', '.join(unknown)}: expected {', '.join(_ENTRIES)}{older}")
    if not isinstance(entries.get("fork_by_default", True), bool):
        raise CheckpointError(f"{file}: fork_by_default is {entries['fork_by_default']!r}: expected true or false")
    if not isinstance(entries.get("mask_tokens") or [], list):
        raise CheckpointError(f"{file}: mask_tokens is {entries['mask_tokens']!r}: expected a list")
    return entries


def mechanism_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The numbers of each mechanism that a folder's sar_config.json names, by the mechanism's name."""
    entries = read_sar_config(folder).get("mechanisms")
    where = f"{folder / SAR_FILE}: mechanisms"
    members = JsonField({} if entries is None else entries, where, Rules(CheckpointError)).members()
    return {name: entry.object() for name, entry in members.items() if entry.value is not None}


def tensor_file(folder: Path, name: str) -> Path:
    """The file with the tensors of a mechanism."""
    return folder / f"{name}.safetensors"


def write_sar_config(folder: Path, changes: dict[str, Any]) -> None:
    """Set entries in a folder's sar_config.json; all other entries stay."""
    entries = read_sar_config(folder)
    replace_text(folder / SAR_FILE, json.dumps({**entries, **changes}, indent=2, ensure_ascii=False) + "\n")


def read_acceptance(folder: Path) -> tuple[DraftAcceptance, ...]:
    """The measured acceptance rates in a folder's sar_config.json, by temperature; empty if nothing was measured."""
    entry = read_sar_config(folder).get("acceptance")
    advice = "; remove the entry, and measure again with `spaceport acceptance --save`"
    found = JsonField(entry, f"{folder / SAR_FILE}: acceptance", Rules(CheckpointError, advice))
    return () if entry is None else draft_acceptances(found)


def save_acceptance(folder: Path, measured: DraftAcceptance) -> None:
    """Store measured acceptance rates in a folder's sar_config.json, in place of those at the same temperature."""
    write_sar_config(
        folder, {"acceptance": [asdict(entry) for entry in with_acceptance(read_acceptance(folder), measured)]}
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: not a regular file: expected a JSON file")
    try:
        data = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # ValueError: not JSON, not UTF-8, too many digits
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: contains {type(data).__name__}: expected an object")
    return cast(dict[str, Any], data)


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


@dataclass(frozen=True)
class Noise:
    """Mask tokens whose embeddings are copies of other tokens' embeddings."""

    ids: tuple[int, ...]  # of the copied tokens, one for each mask token
    seed: int  # with which they were selected


def read_mask_layout(folder: Path) -> MaskLayout:
    """What the mask rows of a folder's model predict and see; raises if an entry about it is invalid."""
    file, entries = folder / SAR_FILE, read_sar_config(folder)
    shift, group = entries.get("shift", True), entries.get("group", "causal")
    if not isinstance(shift, bool):
        raise CheckpointError(f"{file}: shift is {shift!r}: expected true or false")
    if group not in GROUPS:
        raise CheckpointError(f"{file}: group is {group!r}: expected {' or '.join(GROUPS)}")
    read_noise(folder)
    return MaskLayout(shift, group)


def read_noise(folder: Path) -> Noise | None:
    """The tokens whose embeddings are those of a folder's mask tokens, if they are copies."""
    file, entries = folder / SAR_FILE, read_sar_config(folder)
    entry = entries.get("noise")
    if entry is None:
        return None
    masks = entries.get("mask_tokens") or []
    valid = (
        isinstance(entry, dict)
        and set(entry) == {"ids", "seed"}
        and isinstance(entry["ids"], list)
        and all(is_whole(token, 0) for token in entry["ids"])
        and is_whole(entry["seed"], 0)
    )
    if not valid or len(entry["ids"]) != len(masks):
        raise CheckpointError(
            f"{file}: noise is {entry!r}: expected null, or ids, one for each of the {len(masks)} mask_tokens, and seed"
        )
    return Noise(tuple(entry["ids"]), entry["seed"])


def is_origin(value: object) -> bool:
    """Whether a value can be an entry."""
    return isinstance(value, str) and 0 < len(value) <= _ORIGIN_LENGTH and value.isprintable()


def draft_origin(folder: Path, vocab_size: int, flags: bool) -> dict[str, str]:
    """The entries `method` and `adapter` of a manifest's provenance, without those that are not known.

    With `flags`, the mask tokens are from the command line, so the files do not say how they draft.
    """
    entries = read_sar_config(folder)
    found: dict[str, str] = {}
    for name in _ORIGIN:
        value = entries.get(name)
        if value is None:
            continue
        if not is_origin(value):
            raise CheckpointError(
                f"{folder / SAR_FILE}: {name} is {value!r}: expected null, or a printable text of 1 to {_ORIGIN_LENGTH} characters"
            )
        found[name] = value
    if not found and not flags and "mask_tokens" not in entries and config_mask_token(folder, vocab_size) is not None:
        return {"method": PARD}
    return found
