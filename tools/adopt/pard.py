"""PARD: checkpoints that draft with one shared mask token, which config.json names."""

from __future__ import annotations

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.sar_config import PARD as PARD_METHOD
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.given import Given, refuse_noise_seed
from spaceport.tools.adopt.plan import AdoptionPlan, Method


def _recognize(given: Given) -> str | None:
    entry = given.named_mask if given.adapter is None else None
    return None if entry is None else f"{entry.name} {entry.token} in config.json"


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    if given.request.mask_tokens:
        raise OptionFault("--mask-token has no effect: config.json names the mask token; leave it out")
    refuse_noise_seed(given.request)
    masks = {str(token): token for token in checkpoint.tokens.mask}
    return AdoptionPlan(PARD.name, evidence, given.checkpoint, masks, checkpoint.drafts.mask_slots, None)


PARD = Method(PARD_METHOD, "PARD: one shared mask token", _recognize, _plan, writes=False)
