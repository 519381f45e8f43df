"""Sar_config: the file sar_config.json of a checkpoint folder, with its special tokens and its adapter."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.draft_acceptance import DraftAcceptance, draft_acceptances, with_acceptance
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules

SAR_FILE = "sar_config.json"

_ENTRIES = (
    *("mask_tokens", "mask_slots", "fork_token", "child_token", "fork_by_default", "mask_adapter"),
    *("shift", "group", "prefix", "noise"),  # how mask slots draft
    *("heads", "method", "adapter"),
    "acceptance",
)


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
        raise CheckpointError(f"{file}: unknown entries {', '.join(unknown)}: expected {', '.join(_ENTRIES)}")
    if not isinstance(entries.get("fork_by_default", True), bool):
        raise CheckpointError(f"{file}: fork_by_default is {entries['fork_by_default']!r}: expected true or false")
    if not isinstance(entries.get("mask_tokens") or [], list):
        raise CheckpointError(f"{file}: mask_tokens is {entries['mask_tokens']!r}: expected a list")
    return entries


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
