"""Special tokens: the ids of a checkpoint's mask, fork, child and end-of-text tokens, and its number of mask slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from spaceport.exporter.config_mask_token import config_mask_token
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, is_id, read_sar_config
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import MAX_MASK_SLOTS, TokenIds
from spaceport.graphs.contract.mask_layout import CAUSAL, MaskLayout

DEFAULT_MASK_SLOTS = 5  # as published for SPACE; used if a checkpoint names one mask token and no number


@dataclass(frozen=True)
class TokenFlags:
    """Special tokens from the command line, by id or by text; missing ones are read from sar_config.json."""

    mask: tuple[str, ...] = ()
    fork: str | None = None
    child: str | None = None
    max_mask_slots: int | None = None


def special_tokens(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: Any,
    generation: dict[str, Any],
    flags: TokenFlags,
    vocab: int,
    mask_layout: MaskLayout = CAUSAL,
) -> tuple[TokenIds, int]:
    """The special token ids, and the number of mask slots, that flags or a folder's sar_config.json name.

    Without mask_tokens in sar_config.json, the mask token is the one in config.json, if it names one as PARD does.
    """
    config_entries = read_sar_config(folder)
    masks = flags.mask or _configured_masks(folder, config_entries, vocab)
    fork = flags.fork if flags.fork is not None else config_entries.get("fork_token")
    child = flags.child if flags.child is not None else config_entries.get("child_token")
    ids = TokenIds(
        mask=tuple(_token_id(token, "mask", tokenizer, vocab) for token in masks),
        fork=None if fork is None else _token_id(str(fork), "fork", tokenizer, vocab),
        child=None if child is None else _token_id(str(child), "child", tokenizer, vocab),
        end=_end_ids(config, tokenizer, generation, vocab),
    )
    if (ids.fork is None) != (ids.child is None):
        raise CheckpointError(
            "a fork token needs a child token and vice versa: set both --fork-token and --child-token"
        )
    named = [*dict.fromkeys(ids.mask), *(token for token in (ids.fork, ids.child) if token is not None), *ids.end]
    twice = sorted({token for token in named if named.count(token) > 1})
    if twice:
        raise CheckpointError(
            f"token id {twice[0]} has two of the roles mask, fork, child and end of text: expected different tokens"
        )
    return ids, _mask_slots(ids, config_entries.get("mask_slots"), flags.max_mask_slots, mask_layout)


def _configured_masks(folder: Path, entries: dict[str, Any], vocab: int) -> tuple[str, ...]:
    """The mask tokens of a checkpoint or adapter folder, by id or by text."""
    if "mask_tokens" in entries:
        return tuple(str(token) for token in entries["mask_tokens"] or ())
    named = config_mask_token(folder, vocab)
    return () if named is None else (str(named),)


def _mask_slots(ids: TokenIds, configured: Any, requested: int | None, mask_layout: MaskLayout) -> int:
    """The maximum number of mask slots: as requested, else as configured, else one per mask token or the default."""
    if not ids.mask:
        if requested:
            raise CheckpointError(
                f"--max-mask-slots is {requested}, but no mask token is known: set one with --mask-token"
            )
        return 0
    distinct = len(ids.mask) > 1
    slots = (
        requested
        if requested is not None
        else configured
        if configured is not None
        else len(ids.mask) - mask_layout.lead
        if distinct
        else DEFAULT_MASK_SLOTS
    )
    if not is_whole(slots, 1) or slots > MAX_MASK_SLOTS:
        raise CheckpointError(
            f"the number of mask slots is {slots!r}: expected 1 to {MAX_MASK_SLOTS} as --max-mask-slots, or as mask_slots in {SAR_FILE}"
        )
    if distinct and mask_layout.rows(slots) > len(ids.mask):
        raise CheckpointError(
            f"{slots} mask slots, but {len(ids.mask)} mask tokens: expected one for each mask slot, or one for all"
            + ("; without shift, one more for the first row of a group" if mask_layout.lead else "")
        )
    return slots


def _token_id(token: str, role: str, tokenizer: Any, vocab: int) -> int:
    """The id of a token given by id or by text; digits are always an id, even where a token has this text."""
    known = int(token) if is_id(token) else tokenizer.backend_tokenizer.token_to_id(token)
    if known is None:
        raise CheckpointError(
            f"{role} token {token!r} is not in the tokenizer: expected one of its tokens, or an id from 0 to {vocab - 1}"
        )
    if not 0 <= known < vocab:
        raise CheckpointError(
            f"{role} token {token!r} is id {known}, the model's vocabulary ends at {vocab - 1}: expected an id within it"
        )
    return int(known)


def _end_ids(config: PreTrainedConfig, tokenizer: Any, generation: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """The end-of-text ids of the generation config, or else of the model config, or else of the tokenizer."""
    sources: Sequence[Any] = (
        generation.get("eos_token_id"),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    found = next((value for value in sources if value is not None), ())
    ids = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    wrong = [value for value in ids if not isinstance(value, int) or not 0 <= value < vocab]
    if wrong:
        raise CheckpointError(
            f"end-of-text id {wrong[0]!r} is outside the model's vocabulary of {vocab}: correct generation_config.json"
        )
    return ids
