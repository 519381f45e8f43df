"""Sar_config: what a checkpoint folder says of its special tokens and of its adapter, beside the model's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from spaceport.graphs.contract.faults import InputFault

SAR_FILE = "sar_config.json"

_ENTRIES = ("mask_tokens", "mask_slots", "fork_token", "child_token", "mask_adapter")


class CheckpointError(InputFault):
    """A folder that cannot be exported; the message says what was found, what is expected and what to do."""


def read_sar_config(folder: Path) -> dict[str, Any]:
    """The entries of a folder's sar_config.json; none if it has no such file."""
    file = folder / SAR_FILE
    if not file.exists():
        return {}
    told = read_json(file)
    unknown = sorted(set(told) - set(_ENTRIES))
    if unknown:
        raise CheckpointError(f"{file}: unknown entries {', '.join(unknown)}: expected {', '.join(_ENTRIES)}")
    if not isinstance(told.get("mask_tokens") or [], list):
        raise CheckpointError(f"{file}: mask_tokens is {told['mask_tokens']!r}: expected a list")
    return told


def write_sar_config(folder: Path, told: dict[str, Any]) -> None:
    """Put entries into a folder's sar_config.json; those that are there already and are not told stay."""
    kept = read_sar_config(folder)
    (folder / SAR_FILE).write_text(json.dumps({**kept, **told}, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file}: not JSON that can be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: holds {type(data).__name__}: expected an object")
    return cast(dict[str, Any], data)
