"""Draft layout: how the mask slots of a checkpoint were trained to draft, as its sar_config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, read_sar_config
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.mask_layout import GROUPS, Group, MaskLayout


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
    noise: Noise | None = None

    @property
    def mask_layout(self) -> MaskLayout:
        """The part that the runtime needs."""
        return MaskLayout(self.shift, self.group)


def read_draft_layout(folder: Path) -> DraftLayout:
    """The draft layout in a folder's sar_config.json; raises if an entry is invalid."""
    file, entries = folder / SAR_FILE, read_sar_config(folder)
    shift, group = entries.get("shift", True), entries.get("group", "causal")
    if not isinstance(shift, bool):
        raise CheckpointError(f"{file}: shift is {shift!r}: expected true or false")
    if group not in GROUPS:
        raise CheckpointError(f"{file}: group is {group!r}: expected {' or '.join(GROUPS)}")
    return DraftLayout(shift, group, _noise(file, entries))


def layout_entries(layout: DraftLayout) -> dict[str, Any]:
    """A draft layout as entries of sar_config.json."""
    entries: dict[str, Any] = {"shift": layout.shift, "group": layout.group}
    if layout.noise is not None:
        entries["noise"] = {"ids": list(layout.noise.ids), "seed": layout.noise.seed}
    return entries


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
