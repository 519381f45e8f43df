"""Tunable model: a checkpoint opened for tuning, with the special tokens added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint, load_model, load_tokenizer
from spaceport.exporter.checkpoint_files import is_id, read_sar_config
from spaceport.exporter.draft_files import BaseIdentity, identity_of
from spaceport.exporter.draft_files import embedding_rows as embedding_rows
from spaceport.graphs.contract.draft_methods import MaskLayout
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import PRECISIONS
from spaceport.graphs.gated import MaskAdapter
from spaceport.graphs.mechanism import Factors, InputRows, Phrases
from spaceport.training.samples import ConversationEncoder, conversation_encoder
from spaceport.training.settings import DEFAULT_CUTOFF, TokenNames, TrainingSettings, resolve_token_names

_MULTIPLE = 64  # a resized vocabulary is padded to a multiple of this, for efficient matrix products


def add_tokens(tokenizer: Any, model: PreTrainedModel, names: Sequence[str]) -> list[int]:
    """Ids of these special tokens; the embedding of each new token is the mean of the existing embeddings.

    A name that is an id is an existing row of the embeddings, which no token of the tokenizer needs to have.
    """
    backend = tokenizer.backend_tokenizer
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    _check_ids(model, names)
    texts = [name for name in names if not is_id(name)]
    taken = [name for name in texts if name not in added and backend.token_to_id(name) is not None]
    if taken:
        raise InputFault(
            f"{taken[0]!r} is an ordinary token of the tokenizer already: expected a name that does not occur in text; "
            "choose another with --mask-token, --fork-token or --child-token"
        )
    before = len(tokenizer)
    new = [name for name in texts if name not in added]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in new])
    ids = [id_of(tokenizer, name) for name in names]
    _grow(model, max([before, *(token + 1 for token in ids)]))
    with torch.no_grad():
        for rows in embedding_rows(model):
            mean = rows[:before].float().mean(dim=0).to(rows.dtype)
            for name, token in zip(names, ids, strict=True):
                if name in new:
                    rows[token] = mean
    return ids


def id_of(tokenizer: Any, name: str) -> int:
    """The id of a special token that is named by its text or by its id."""
    return int(name) if is_id(name) else int(tokenizer.backend_tokenizer.token_to_id(name))


def _check_ids(model: PreTrainedModel, names: Sequence[str]) -> None:
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    wrong = [name for name in names if is_id(name) and int(name) >= size]
    if wrong:
        raise InputFault(
            f"special token {wrong[0]} is an id beyond the {size} embeddings of the model: expected an id within them, or a text"
        )


def grown(size: int, tokens: int) -> int:
    """The embedding rows of a model with this number of rows, once it has rows for these tokens."""
    return size if tokens <= size else -(-tokens // _MULTIPLE) * _MULTIPLE


def _grow(model: PreTrainedModel, tokens: int) -> None:
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if tokens > size:
        model.resize_token_embeddings(grown(size, tokens), mean_resizing=False)
        with torch.no_grad():
            for rows in embedding_rows(model):
                rows[size:] = rows[:size].float().mean(dim=0).to(rows.dtype)


@dataclass(frozen=True)
class TunableModel:
    """A model with its tokenizer, special tokens and configuration, ready for tuning."""

    checkpoint: Checkpoint
    model: PreTrainedModel  # float32
    tokenizer: Any
    names: TokenNames
    encoder: ConversationEncoder
    mask_slots: int  # of the tuned model
    mask_layout: MaskLayout  # the same
    base: BaseIdentity | None  # of the checkpoint, for a gated adapter

    @property
    def tokens(self) -> TokenIds:
        return self.encoder.tokens

    @property
    def dtype(self) -> torch.dtype:
        """The type of the checkpoint's weights."""
        named = getattr(self.checkpoint.config, "dtype", None)
        if isinstance(named, torch.dtype):
            return named
        dtype: torch.dtype = getattr(torch, named) if named in PRECISIONS else torch.float32
        return dtype


def open_tunable_model(checkpoint: Checkpoint, settings: TrainingSettings, requested: TokenNames) -> TunableModel:
    """Open a checkpoint for tuning and add the special tokens that the objective needs."""
    folder = checkpoint.folder
    added = checkpoint.adapter_folder
    if checkpoint.mechanism(MaskAdapter) is not None and added is None:
        raise InputFault(f"{folder}: has a mask adapter: expected plain weights; tune its base checkpoint instead")
    for mechanism in checkpoint.mechanisms:
        if not isinstance(mechanism, (MaskAdapter, Factors, InputRows, Phrases)):
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
    return TunableModel(
        checkpoint,
        model,
        tokenizer,
        names,
        conversation_encoder(tokenizer, tokens),
        settings.slots or checkpoint.drafts.mask_slots,
        settings.mask_layout if settings.drafts else checkpoint.drafts.layout,
        base,
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
