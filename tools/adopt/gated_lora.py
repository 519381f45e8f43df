"""Gated LoRA: adapters of peft that act on mask tokens only, such as those of I-DLM."""

from __future__ import annotations

from typing import Any

from spaceport.exporter.checkpoint import DEFAULT_MASK_SLOTS, Checkpoint, load_tokenizer
from spaceport.exporter.sar_config import CheckpointError, is_id
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS
from spaceport.tools.adopt.given import Given, check_slots, refuse_noise_seed
from spaceport.tools.adopt.peft_adapter import read_peft_adapter
from spaceport.tools.adopt.plan import AdoptionPlan, Method


def _recognize(given: Given) -> str | None:
    if given.adapter is None:
        return None
    if given.request.mask_tokens:
        return f"--mask-token {' '.join(given.request.mask_tokens)}"
    entry = given.named_mask
    return None if entry is None else f"{entry.name} {entry.token} in config.json"


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    refuse_noise_seed(given.request)
    masks = mask_tokens(given, checkpoint)
    distinct = len(masks) > 1
    slots = given.request.max_mask_slots or (len(masks) if distinct else DEFAULT_MASK_SLOTS)
    check_slots(slots, len(masks) if distinct else MAX_MASK_SLOTS)
    peft = read_peft_adapter(given.peft_folder, checkpoint, tuple(masks.values()))
    return AdoptionPlan(GATED_LORA.name, evidence, given.checkpoint, masks, slots, peft)


def mask_tokens(given: Given, checkpoint: Checkpoint) -> dict[str, int]:
    """The mask tokens, all of them rows of the base model's embedding table."""
    tokenizer = load_tokenizer(checkpoint)
    entry = given.named_mask
    named = given.request.mask_tokens or (() if entry is None else (str(entry.token),))
    found: dict[str, int] = {}
    for name in named:
        token = int(name) if is_id(name) else tokenizer.backend_tokenizer.token_to_id(name)
        _check_mask(given, checkpoint, tokenizer, name, token)
        found[tokenizer.backend_tokenizer.id_to_token(token) or str(token)] = token
    return found


def _check_mask(given: Given, checkpoint: Checkpoint, tokenizer: Any, name: str, token: int | None) -> None:
    vocab = int(checkpoint.config.get_text_config().vocab_size)
    if token is None or not 0 <= token < vocab:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is {'not in its tokenizer' if token is None else f'id {token}'}: "
            f"expected a token of this base model, or an id from 0 to {vocab - 1}; give --mask-token, or the base model "
            "that the adapter was trained on"
        )
    if token < len(tokenizer) and token not in tokenizer.added_tokens_decoder:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is id {token}, an ordinary token {tokenizer.convert_ids_to_tokens(token)!r}: "
            "expected one that no text has, because the adapter would act on it there too; give the right --mask-token"
        )
    if token in checkpoint.tokens.end:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is id {token}, which ends a text: expected another; give the right "
            "--mask-token"
        )


GATED_LORA = Method("gated-lora", "LoRA that acts on mask tokens only (I-DLM)", _recognize, _plan)
