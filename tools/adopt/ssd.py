"""SSD: a prefix of key/value pairs and mask tokens that draft with an unchanged base model, as Qualcomm publishes them."""

from __future__ import annotations

from pathlib import Path

from spaceport.exporter.checkpoint import Checkpoint, load_tokenizer
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS
from spaceport.tools.adopt.forecast_file import PREFIX, forecast_file
from spaceport.tools.adopt.given import Given, check_slots
from spaceport.tools.adopt.new_tokens import new_tokens
from spaceport.tools.adopt.plan import AdoptionPlan, Method, require_no_masks
from spaceport.tools.adopt.published_prefix import read_published_prefix


def _file(given: Given) -> Path | None:
    return forecast_file(given.adapter or given.checkpoint)


def _recognize(given: Given) -> str | None:
    file = _file(given)
    return None if file is None else f"{PREFIX} in {file.name}"


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    file = _file(given)
    if file is None:
        raise ValueError("no file with a forecast prefix: expected one, by which the method was recognized")
    require_no_masks(given, checkpoint, "the file of SSD has mask tokens of its own")
    prefix = read_published_prefix(file, checkpoint)
    most = min(prefix.report["tokens"], MAX_MASK_SLOTS)
    slots = given.request.max_mask_slots or most
    check_slots(slots, most)
    masks = new_tokens(given, load_tokenizer(checkpoint), "forecast", slots)
    return AdoptionPlan(SSD.name, evidence, given.checkpoint, masks, slots, prefix)


SSD = Method(
    "ssd",
    "SSD: a forecast prefix that only mask rows see",
    _recognize,
    _plan,
    f"a file of torch (*.pt) with the tensor {PREFIX}",
)
