"""Tunable model: a checkpoint opened for tuning, with the special tokens added."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from spaceport.exporter.adapter_folder import BaseIdentity, identity_of
from spaceport.exporter.checkpoint import Checkpoint, load_model, load_tokenizer
from spaceport.exporter.checkpoint_files import TIKTOKEN_FILE
from spaceport.exporter.sar_config import read_sar_config
from spaceport.graphs.contract.draft_methods import MaskLayout
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import PRECISIONS
from spaceport.graphs.correction import Factors
from spaceport.graphs.gated import MaskAdapter
from spaceport.graphs.input_rows import InputRows
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder
from spaceport.tools.tune.settings import DEFAULT_CUTOFF, TrainingSettings
from spaceport.tools.tune.token_names import TokenNames, resolve_token_names
from spaceport.tools.tune.vocabulary import add_tokens

# Files of a checkpoint that determine, besides its weights, the training samples.
IDENTITY_FILES = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    TIKTOKEN_FILE,
    "chat_template.jinja",
    "generation_config.json",
    "sar_config.json",
)


@dataclass(frozen=True)
class TunableModel:
    """A model with its tokenizer, special tokens and configuration, ready for tuning."""

    folder: Path
    model: PreTrainedModel  # float32
    dtype: torch.dtype  # of the checkpoint
    tokenizer: Any
    names: TokenNames
    encoder: ConversationEncoder
    mask_slots: int  # of the tuned model
    mask_layout: MaskLayout  # the same
    base: BaseIdentity | None  # of the checkpoint, for a gated adapter
    adapter: MaskAdapter | None  # of the model: it is trained further
    correction: Factors | None  # the same
    input_rows: InputRows | None  # the same

    @property
    def tokens(self) -> TokenIds:
        return self.encoder.tokens


def open_tunable_model(checkpoint: Checkpoint, settings: TrainingSettings, requested: TokenNames) -> TunableModel:
    """Open a checkpoint for tuning and add the special tokens that the objective needs."""
    folder = checkpoint.folder
    added = checkpoint.adapter_folder
    if checkpoint.mechanism(MaskAdapter) is not None and added is None:
        raise InputFault(f"{folder}: has a mask adapter: expected plain weights; tune its base checkpoint instead")
    for mechanism in checkpoint.mechanisms:
        if not isinstance(mechanism, (MaskAdapter, Factors, InputRows)):
            raise InputFault(
                f"{checkpoint.owner}: has {mechanism.name}, which is not tuned: expected plain weights; tune its base "
                "checkpoint instead"
            )
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, "float32")
    base = None if added is None else added.base
    if base is None and settings.method == "gated-lora":
        base = identity_of(folder.stem, model)
    sar_config = read_sar_config(checkpoint.owner)
    mask_rows = settings.mask_layout.rows(settings.slots)
    names = resolve_token_names(mask_rows, settings.distinct, settings.forks, requested, sar_config)
    if len(set(names.all)) < len(names.all):
        raise OptionFault(f"special tokens {', '.join(names.all)} are not all different: expected one name for each")
    ids = add_tokens(tokenizer, model, names.all)
    masks = len(names.masks)
    tokens = TokenIds(
        mask=tuple(ids[:masks]),
        fork=ids[masks] if names.fork else None,
        child=ids[masks + 1] if names.fork else None,
        end=checkpoint.tokens.end,
    )
    slots = settings.slots or checkpoint.drafts.mask_slots
    encoder = conversation_encoder(tokenizer, tokens)
    return TunableModel(
        folder,
        model,
        _dtype_of(checkpoint.config),
        tokenizer,
        names,
        encoder,
        slots,
        settings.mask_layout if settings.drafts else checkpoint.drafts.layout,
        base,
        checkpoint.mechanism(MaskAdapter),
        checkpoint.mechanism(Factors),
        checkpoint.mechanism(InputRows),
    )


def cutoff_for(settings: TrainingSettings, positions: int) -> int:
    """The requested cutoff; the default is limited to the model's maximum positions."""
    if settings.cutoff == DEFAULT_CUTOFF:
        return min(DEFAULT_CUTOFF, positions)
    if settings.cutoff > positions:
        raise OptionFault(
            f"--cutoff is {settings.cutoff}: expected 8 to {positions}, the maximum positions of the model"
        )
    return settings.cutoff


def _dtype_of(config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    dtype: torch.dtype = getattr(torch, named) if named in PRECISIONS else torch.float32
    return dtype
