"""UNO: adapters of peft that act on noise, which is random tokens instead of mask tokens."""

from __future__ import annotations

import random

from spaceport.exporter.checkpoint import DEFAULT_MASK_SLOTS, Checkpoint, load_tokenizer
from spaceport.exporter.sar_config import CheckpointError, CopiedEmbeddings
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.given import Given, check_slots
from spaceport.tools.adopt.new_tokens import new_tokens
from spaceport.tools.adopt.peft_adapter import read_peft_adapter
from spaceport.tools.adopt.plan import AdoptionPlan, Method

_MANIFEST = "uno_training_manifest.json"  # written by UNO's own training, beside the adapter or one folder above


def _recognize(given: Given) -> str | None:
    if given.adapter is None:
        return None
    if given.request.method == UNO.name:
        return f"--method {UNO.name}"
    if given.training.get("noise") == "uniform":
        return "noise uniform in config.json"
    folders = (given.adapter, given.adapter.absolute().parent)
    return _MANIFEST if any((folder / _MANIFEST).exists() for folder in folders) else None


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    if given.request.mask_tokens:
        raise OptionFault("--mask-token has no effect: UNO has random tokens instead; leave it out")
    slots = given.request.max_mask_slots or DEFAULT_MASK_SLOTS
    check_slots(slots, MAX_MASK_SLOTS)
    tokenizer = load_tokenizer(checkpoint)
    seed = given.request.noise_seed or 0
    noise = CopiedEmbeddings(_noise_ids(given, len(tokenizer), slots, seed), seed)
    masks = new_tokens(given, tokenizer, "noise", slots)
    peft = read_peft_adapter(given.peft_folder, checkpoint, tuple(masks.values()))
    return AdoptionPlan(UNO.name, evidence, given.checkpoint, masks, slots, peft, noise=noise)


def _noise_ids(given: Given, tokens: int, count: int, seed: int) -> tuple[int, ...]:
    """Random token ids, uniform from 1 to below the mask token of the training, which is where UNO ends its noise."""
    entry = given.named_mask
    end = tokens if entry is None else min(entry.token, tokens)
    if end - 1 < count:
        raise CheckpointError(
            f"{given.checkpoint}: noise is selected from the ids 1 to {end - 1}: expected at least {count} of them; check "
            "mask_token_id in config.json, or lower --max-mask-slots"
        )
    return tuple(random.Random(seed).sample(range(1, end), count))


UNO = Method("uno", "UNO: LoRA that acts on random tokens only", _recognize, _plan)
