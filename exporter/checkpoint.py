"""Checkpoint: open and check a Hugging Face checkpoint folder before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.exporter.adapter_folder import AdapterFolder, add_embeddings, add_special_tokens, read_adapter_folder
from spaceport.exporter.checkpoint_files import ModelFiles, require_checkpoint
from spaceport.exporter.checkpoint_source import CheckpointSource, read_source, reason_of
from spaceport.exporter.mechanisms import (
    MECHANISMS,
    apply_mechanisms,
    check_mechanisms,
    check_values,
    read_mechanisms,
)
from spaceport.exporter.sar_config import PARD, SarConfig, config_mask_token, is_id
from spaceport.exporter.sar_config import SAR_FILE as SAR_FILE
from spaceport.exporter.sar_config import CheckpointError as CheckpointError
from spaceport.graphs.contract.draft_methods import LOOKUP, MAX_MASK_SLOTS, UNKNOWN, DraftMethod, MaskLayout
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.mechanism import M, Mechanism
from spaceport.graphs.streamed_weights import keep_values

DEFAULT_MASK_SLOTS = 5  # as published for SPACE; used if a checkpoint names one mask token and no number


@dataclass(frozen=True)
class TokenFlags:
    """Special tokens from the command line, by id or by text; missing ones are read from sar_config.json."""

    mask: tuple[str, ...] = ()
    fork: str | None = None
    child: str | None = None
    max_mask_slots: int | None = None


def special_tokens(
    masks: Sequence[str], fork: str | None, child: str | None, source: CheckpointSource, tokenizer: Any, vocab: int
) -> TokenIds:
    """The ids of special tokens, and of those that end a text."""
    ids = TokenIds(
        mask=tuple(_token_id(token, "mask", tokenizer, vocab) for token in masks),
        fork=None if fork is None else _token_id(fork, "fork", tokenizer, vocab),
        child=None if child is None else _token_id(child, "child", tokenizer, vocab),
        end=_end_ids(source.config, tokenizer, source.generation, vocab),
    )
    if (ids.fork is None) != (ids.child is None):
        raise CheckpointError(
            "a fork token needs a child token and vice versa: set both --fork-token and --child-token"
        )
    if ids.with_two_roles is not None:
        raise CheckpointError(
            f"token id {ids.with_two_roles} has two of the roles mask, fork, child and end of text: expected different "
            "tokens"
        )
    return ids


def _mask_slots(ids: TokenIds, configured: int | None, requested: int | None, mask_layout: MaskLayout) -> int:
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
            f"the number of mask slots is {slots!r}: expected 1 to {MAX_MASK_SLOTS} as --max-mask-slots, or as "
            f"mask_slots in {SAR_FILE}"
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
            f"{role} token {token!r} is not in the tokenizer: expected one of its tokens, or an id from 0 to "
            f"{vocab - 1}"
        )
    if not 0 <= known < vocab:
        raise CheckpointError(
            f"{role} token {token!r} is id {known}, the model's vocabulary ends at {vocab - 1}: expected an id within "
            "it"
        )
    return int(known)


def _end_ids(config: PreTrainedConfig, tokenizer: Any, generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """The end-of-text ids of the generation config, or else of the model config, or else of the tokenizer."""
    sources: Sequence[Any] = (
        generation.get("eos_token_id"),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    named = next((value for value in sources if value is not None), ())
    ids = tuple(named) if isinstance(named, (list, tuple)) else (named,)
    wrong = [value for value in ids if not isinstance(value, int) or not 0 <= value < vocab]
    if wrong:
        raise CheckpointError(
            f"end-of-text id {wrong[0]!r} is outside the model's vocabulary of {vocab}: correct generation_config.json"
        )
    return ids


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights."""

    source: CheckpointSource
    tokens: TokenIds
    drafts: DraftMethod
    mechanisms: tuple[Mechanism, ...]  # with which it drafts
    fork_by_default: bool  # whether a request may fork unless it says otherwise
    tokenizer: str  # content of tokenizer.json
    template: str | None  # chat template
    special_tokens: dict[str, str]
    remote_code: bool
    adapter_folder: AdapterFolder | None  # with the mechanisms; None: they are in the checkpoint

    @property
    def folder(self) -> Path:
        """The folder or GGUF file of the model."""
        return self.source.files.path

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return self.source.config

    @property
    def owner(self) -> Path:
        """The folder with the mechanisms and special tokens."""
        return self.folder if self.adapter_folder is None else self.adapter_folder.path

    def mechanism(self, kind: type[M]) -> M | None:
        """The mechanism of a kind, if the checkpoint has one."""
        return next((mechanism for mechanism in self.mechanisms if isinstance(mechanism, kind)), None)

    def with_mechanism(self, mechanism: Mechanism) -> Checkpoint:
        """The checkpoint with one more mechanism, which replaces its own of that kind."""
        others = [one for one in self.mechanisms if one.name != mechanism.name]
        drafts = replace(self.drafts, mechanisms={**self.drafts.mechanisms, mechanism.name: mechanism.entry})
        return replace(self, mechanisms=(*others, mechanism), drafts=drafts)


def template_of(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer, the default one of several; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def open_checkpoint(
    model: Path | ModelFiles, flags: TokenFlags, remote_code: bool = False, adapter: Path | None = None
) -> Checkpoint:
    """The checkpoint in a folder with its special token ids, and with what an adapter folder adds, if one is given."""
    files = model if isinstance(model, ModelFiles) else require_checkpoint(model)
    added = None if adapter is None else _adapter_folder(adapter, files)
    owner, sar = (files.path, files.sar_config) if added is None else (added.path, added.sar_config)
    mechanisms = read_mechanisms(owner, sar)
    source = read_source(files, remote_code)
    vocab_size = int(source.config.get_text_config().vocab_size)
    if added is not None:
        with _naming(files.path):
            added.base.check_config(source.config)
        vocab_size = added.vocab_size
    tokenizer = _tokenizer(source, added)
    if added is None and not flags.mask and sar.mask_tokens is None:
        pard = config_mask_token(files.path / "config.json", files.config, vocab_size)
        if pard is not None:
            sar = replace(sar, mask_tokens=(str(pard),), method=sar.method or PARD)
    fork, child = (
        named if requested is None else requested
        for requested, named in ((flags.fork, sar.fork_token), (flags.child, sar.child_token))
    )
    tokens = special_tokens(flags.mask or sar.mask_tokens or (), fork, child, source, tokenizer, vocab_size)
    check_mechanisms(owner, mechanisms, tokens)
    mask_slots = _mask_slots(tokens, sar.mask_slots, flags.max_mask_slots, sar.layout)
    named_tokens = tokenizer.special_tokens_map.items()
    return Checkpoint(
        source=source,
        tokens=tokens,
        drafts=_draft_method(replace(sar, acceptance=()) if flags.mask else sar, mechanisms, mask_slots),
        mechanisms=mechanisms,
        fork_by_default=sar.fork_by_default,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        template=template_of(tokenizer),
        special_tokens={name: str(token) for name, token in named_tokens if isinstance(token, str)},
        remote_code=remote_code,
        adapter_folder=added,
    )


def _draft_method(sar: SarConfig, mechanisms: Sequence[Mechanism], mask_slots: int) -> DraftMethod:
    """How a model with these mechanisms and mask slots drafts."""
    heads = sum(mechanism.heads for mechanism in mechanisms)
    drafts = bool(heads or mask_slots)
    return DraftMethod(
        name=sar.method or UNKNOWN if drafts else LOOKUP,
        adapter=sar.adapter if drafts else None,
        predictor="head" if heads else "mask",
        max_tokens=heads or mask_slots,
        layout=sar.layout,
        mechanisms={mechanism.name: mechanism.entry for mechanism in mechanisms},
        acceptance=sar.acceptance,
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """A transformers tokenizer of a checkpoint, which neither cuts nor pads texts."""
    return _tokenizer(checkpoint.source, checkpoint.adapter_folder)


def _tokenizer(source: CheckpointSource, added: AdapterFolder | None) -> Any:
    tokenizer = source.load_tokenizer()
    tokenizer.backend_tokenizer.no_truncation()  # some tokenizer.json files enable it
    tokenizer.backend_tokenizer.no_padding()
    if added is not None:
        with _naming(source.files.path):
            add_special_tokens(tokenizer, added)
    return tokenizer


def load_model(checkpoint: Checkpoint, dtype: Precision, scratch: Path | None = None) -> PreTrainedModel:
    """The model with the weights and mechanisms of the checkpoint.

    With a `scratch` folder, its weights are read when they are needed, if its checkpoint allows it."""
    check_values(checkpoint.owner, checkpoint.mechanisms)
    try:
        model, report = checkpoint.source.load_weights(getattr(torch, dtype), scratch)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its weights cannot be loaded: {reason_of(error)}: copy or download it again"
        ) from error
    lost = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.folder}: weights {', '.join(lost[:3])}{more} are missing or of another shape: expected "
            f"every weight of {type(model).__name__}; save the checkpoint again with save_pretrained"
        )
    added = checkpoint.adapter_folder
    if added is not None:
        for parameter in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            keep_values(parameter)  # rows of these tables are replaced
        with _naming(checkpoint.folder):
            add_embeddings(model, added, dtype)
    apply_mechanisms(model, checkpoint.owner, checkpoint.mechanisms, checkpoint.tokens.mask)
    return cast(PreTrainedModel, model.eval())


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Begin the message of an error with the checkpoint's folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _adapter_folder(adapter: Path, base: ModelFiles) -> AdapterFolder:
    """The adapter folder; raises for a base model that drafts with mechanisms of its own."""
    for name in base.sar_config.mechanisms:
        if name not in MECHANISMS or not MECHANISMS[name].refines:
            raise CheckpointError(f"{base.path}: has {name} already: expected its base model, to add that in {adapter}")
    return read_adapter_folder(adapter)
