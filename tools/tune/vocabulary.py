"""Vocabulary: adds the mask, fork and child tokens to a tokenizer and to a model's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.adapter_folder import embedding_rows as embedding_rows
from spaceport.exporter.sar_config import is_id
from spaceport.graphs.contract.faults import InputFault

_MULTIPLE = 64  # a resized vocabulary is padded to a multiple of this, for efficient matrix products


class VocabularyError(InputFault):
    """A special token that cannot be added."""


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
        raise VocabularyError(
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
        raise VocabularyError(
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
