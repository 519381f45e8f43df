"""Draft layout: how the mask slots of a checkpoint were trained to draft, as its sar_config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, read_sar_config
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.mask_layout import GROUPS, Group, MaskLayout

_ADVICE = "this version runs no prefix"


@dataclass(frozen=True)
class Noise:
    """Mask tokens whose embeddings are copies of other tokens' embeddings."""

    ids: tuple[int, ...]  # of the copied tokens, one for each mask token
    seed: int  # with which they were selected


@dataclass(frozen=True)
class DraftLayout:
    """What a mask row predicts and sees."""

    shift: bool = True  # it predicts the token after its position; False: the token at its position
    group: Group = "causal"  # it sees the mask rows of its group before it; block: all of them
    prefix: str | None = None  # file with KV slots that only mask rows see
    noise: Noise | None = None

    @property
    def mask_layout(self) -> MaskLayout:
        """The part that the runtime needs."""
        return MaskLayout(self.shift, self.group)


def read_draft_layout(folder: Path) -> DraftLayout:
    """The draft layout in a folder's sar_config.json; raises if an entry is invalid or cannot be run."""
    file, entries = folder / SAR_FILE, read_sar_config(folder)
    shift, group, prefix = entries.get("shift", True), entries.get("group", "causal"), entries.get("prefix")
    if not isinstance(shift, bool):
        raise CheckpointError(f"{file}: shift is {shift!r}: expected true or false")
    if group not in GROUPS:
        raise CheckpointError(f"{file}: group is {group!r}: expected {' or '.join(GROUPS)}")
    if prefix is not None and not isinstance(prefix, str):
        raise CheckpointError(f"{file}: prefix is {prefix!r}: expected the name of a file, or null")
    layout = DraftLayout(shift, group, prefix, _noise(file, entries))
    for reason in _not_supported(layout):
        raise CheckpointError(f"{file}: {reason}: {_ADVICE}")
    return layout


def layout_entries(layout: DraftLayout) -> dict[str, Any]:
    """A draft layout as entries of sar_config.json."""
    entries: dict[str, Any] = {"shift": layout.shift, "group": layout.group}
    if layout.prefix is not None:
        entries["prefix"] = layout.prefix
    if layout.noise is not None:
        entries["noise"] = {"ids": list(layout.noise.ids), "seed": layout.noise.seed}
    return entries


def _not_supported(layout: DraftLayout) -> list[str]:
    """Why a layout cannot be run; empty if it can."""
    found = []
    if layout.prefix is not None:
        found.append(f"prefix is {layout.prefix!r}, so mask rows see KV slots that no token has")
    return found


def _noise(file: Path, entries: Mapping[str, Any]) -> Noise | None:
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
