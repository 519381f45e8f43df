"""Nemotron: the adapter `linear_spec_lora` of Nemotron-Labs-Diffusion, whose mask rows see each other and have no shift."""

from __future__ import annotations

from typing import Any

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS, MaskLayout
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.tools.adopt.gated_lora import mask_tokens
from spaceport.tools.adopt.given import NEMOTRON_ADAPTER, Given, check_slots, refuse_noise_seed
from spaceport.tools.adopt.peft_adapter import read_peft_adapter
from spaceport.tools.adopt.plan import AdoptionPlan, Method

NEMOTRON_TYPE = "nemotron_labs_diffusion"
_LAYOUT = MaskLayout(shift=False, group="block")
_TYPES = (NEMOTRON_TYPE, "ministral3")  # model_type of base models
_TEXT_ROWS = 1  # of a block: its first row is the last token of the text


def _recognize(given: Given) -> str | None:
    if given.adapter is None:
        return None
    if given.request.method == NEMOTRON.name:
        return f"--method {NEMOTRON.name}"
    if given.adapter.name == NEMOTRON_ADAPTER:
        return f"folder {NEMOTRON_ADAPTER}"
    types = (config.get("model_type") for config in (given.training, given.config))
    return f"model_type {NEMOTRON_TYPE}" if NEMOTRON_TYPE in types else None


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    refuse_noise_seed(given.request)
    kind = given.config.get("model_type")
    if kind not in _TYPES:
        raise CheckpointError(
            f"{given.checkpoint}: model_type is {kind!r}: expected {' or '.join(_TYPES)} as base model of "
            f"{NEMOTRON_ADAPTER}; give the checkpoint that the adapter was published with"
        )
    masks = mask_tokens(given, checkpoint)
    if not masks:
        raise CheckpointError(
            f"{given.checkpoint}: no mask token is known: expected mask_token_id in config.json, as published; give "
            "--mask-token"
        )
    slots = given.request.max_mask_slots or _default_slots(given)
    check_slots(slots, MAX_MASK_SLOTS)
    peft = read_peft_adapter(given.peft_folder, checkpoint, tuple(masks.values()))
    return AdoptionPlan(NEMOTRON.name, evidence, given.checkpoint, masks, slots, peft, _LAYOUT)


def _default_slots(given: Given) -> int:
    """The mask slots of a block of `block_size` rows."""
    size: Any = given.training.get("block_size") or given.config.get("block_size")
    least = 1 + _TEXT_ROWS + _LAYOUT.lead
    if not is_whole(size, least):
        raise CheckpointError(
            f"{given.checkpoint}: block_size is {size!r}: expected a whole number of at least {least} in config.json, as "
            "published; give --max-mask-slots"
        )
    return min(MAX_MASK_SLOTS, int(size) - _TEXT_ROWS - _LAYOUT.lead)


NEMOTRON = Method("nemotron", "Nemotron-Labs-Diffusion: LoRA on a block of mask tokens", _recognize, _plan)
