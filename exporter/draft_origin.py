"""Draft origin: the method by which a checkpoint drafts, and the published weights that it drafts with, as its files say."""

from __future__ import annotations

from pathlib import Path

from spaceport.exporter.config_mask_token import config_mask_token
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, read_sar_config

PARD = "pard"  # the method of a checkpoint whose config.json names its mask token
_ENTRIES = ("method", "adapter")
_MOST = 200  # characters of an entry


def is_origin(value: object) -> bool:
    """Whether a value can be an entry."""
    return isinstance(value, str) and 0 < len(value) <= _MOST and value.isprintable()


def draft_origin(folder: Path, vocab_size: int, flags: bool) -> dict[str, str]:
    """The entries `method` and `adapter` of a manifest's provenance, without those that are not known.

    With `flags`, the mask tokens are from the command line, so the files do not say how they draft.
    """
    entries = read_sar_config(folder)
    found: dict[str, str] = {}
    for name in _ENTRIES:
        value = entries.get(name)
        if value is None:
            continue
        if not is_origin(value):
            raise CheckpointError(
                f"{folder / SAR_FILE}: {name} is {value!r}: expected null, or a printable text of 1 to {_MOST} characters"
            )
        found[name] = value
    if not found and not flags and "mask_tokens" not in entries and config_mask_token(folder, vocab_size) is not None:
        return {"method": PARD}
    return found
