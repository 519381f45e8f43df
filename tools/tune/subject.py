"""Subject: a checkpoint opened to be tuned, its tokens added."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint, load_model
from spaceport.exporter.sar_config import read_sar_config
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import PRECISIONS
from spaceport.tools.tune.names import Names, names_for
from spaceport.tools.tune.settings import DEFAULT_CUTOFF, TrainingSettings
from spaceport.tools.tune.spelling import ConversationSpelling, spelling_of
from spaceport.tools.tune.vocabulary import add_tokens

# Files of a checkpoint that decide, beside its weights, what is learned.
DECIDING = ("config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "sar_config.json")  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model that learns, with all that is written down of it."""

    folder: Path
    model: PreTrainedModel  # in float32, whatever the checkpoint's type
    dtype: torch.dtype  # the checkpoint's
    tokenizer: Any
    names: Names
    spelling: ConversationSpelling
    mask_slots: int  # that it will have when it is tuned

    @property
    def tokens(self) -> TokenIds:
        return self.spelling.tokens

    @property
    def new_ids(self) -> list[int]:
        """The tokens that are ours: their embeddings learn whatever the method."""
        more = (self.tokens.fork, self.tokens.child)
        return [*self.tokens.mask, *(token for token in more if token is not None)]


def open_subject(checkpoint: Checkpoint, settings: TrainingSettings, asked: Names) -> Subject:
    """A checkpoint's model and tokenizer, with the tokens that its tuning needs."""
    folder, remote_code = checkpoint.folder, checkpoint.remote_code
    if checkpoint.adapter is not None:
        raise InputFault(
            f"{folder}: has a mask adapter: expected plain weights; tune the checkpoint that it was made from"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    tokenizer.backend_tokenizer.no_truncation()  # which some tokenizer.json tell, to a length of their own
    tokenizer.backend_tokenizer.no_padding()
    model = load_model(checkpoint, "float32")
    names = names_for(settings.slots, settings.distinct, settings.forks, asked, read_sar_config(folder))
    if len(set(names.all)) < len(names.all):
        raise OptionFault(f"the tokens {', '.join(names.all)} are not all different: expected a name for each")
    ids = add_tokens(tokenizer, model, names.all)
    masks = len(names.masks)
    tokens = TokenIds(
        mask=tuple(ids[:masks]),
        fork=ids[masks] if names.fork else None,
        child=ids[masks + 1] if names.fork else None,
        end=checkpoint.tokens.end,
    )
    slots = settings.slots or checkpoint.max_mask_slots
    spelling = spelling_of(tokenizer, tokens)
    return Subject(folder, model, _dtype_of(checkpoint.config), tokenizer, names, spelling, slots)


def cutoff_for(settings: TrainingSettings, positions: int) -> int:
    """The cutoff that was asked for; the default one, or as much as the model can take."""
    if settings.cutoff == DEFAULT_CUTOFF:
        return min(DEFAULT_CUTOFF, positions)
    if settings.cutoff > positions:
        raise OptionFault(
            f"--cutoff is {settings.cutoff}: expected 8 to {positions}, the positions that the model knows"
        )
    return settings.cutoff


def _dtype_of(config: Any) -> torch.dtype:
    told = getattr(config, "dtype", None)
    if isinstance(told, torch.dtype):
        return told
    dtype: torch.dtype = getattr(torch, told) if told in PRECISIONS else torch.float32
    return dtype
