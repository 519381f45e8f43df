"""Medusa: heads over the last hidden state that draft instead of mask slots."""

from __future__ import annotations

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.tools.adopt.given import HEADS_FILES, Given
from spaceport.tools.adopt.plan import AdoptionPlan, Method, require_no_masks
from spaceport.tools.adopt.published_heads import heads_files, read_published_heads


def _recognize(given: Given) -> str | None:
    files = heads_files(given)
    if not files:
        return None
    return files[0].name if len(files) == 1 and given.adapter is not None else "medusa_num_heads in config.json"


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    require_no_masks(given, checkpoint, "heads draft without mask tokens")
    heads = read_published_heads(given, checkpoint)
    return AdoptionPlan(MEDUSA.name, evidence, given.checkpoint, {}, 0, heads)


MEDUSA = Method(
    "medusa",
    "Medusa: heads over the last hidden state",
    _recognize,
    _plan,
    f"{' or '.join(HEADS_FILES)}, or medusa_num_heads in config.json",
)
