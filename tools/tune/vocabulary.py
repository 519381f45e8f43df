"""Vocabulary: the mask, fork and child tokens added to a tokenizer and to a model's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault

_MULTIPLE = 64  # a vocabulary that has to grow becomes a multiple of this: matrix products like it


class VocabularyError(InputFault):
    """A token that cannot be added; the message says why."""


def add_tokens(tokenizer: Any, model: PreTrainedModel, names: Sequence[str]) -> list[int]:
    """The ids of these tokens, those that are new with embeddings at the mean of the old ones."""
    backend = tokenizer.backend_tokenizer
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    taken = [name for name in names if name not in added and backend.token_to_id(name) is not None]
    if taken:
        raise VocabularyError(
            f"the tokenizer has {taken[0]!r} as an ordinary piece of text: expected a name that no text can hold; "
            "choose another with --mask-token, --fork-token or --child-token"
        )
    before = len(tokenizer)
    new = [name for name in names if name not in added]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in new])
    ids = [int(backend.token_to_id(name)) for name in names]
    _grow(model, max([before, *(token + 1 for token in ids)]))
    with torch.no_grad():
        for rows in embedding_rows(model):
            mean = rows[:before].float().mean(dim=0).to(rows.dtype)
            for name, place in zip(names, ids, strict=True):
                if name in new:
                    rows[place] = mean
    return ids


def embedding_rows(model: PreTrainedModel) -> list[Tensor]:
    """The tensors with one row for each token, tied ones once."""
    tables = [model.get_input_embeddings().weight, cast(nn.Linear, model.get_output_embeddings()).weight]
    bias = getattr(model.get_output_embeddings(), "bias", None)
    found = {id(tensor): cast(Tensor, tensor) for tensor in (*tables, bias) if tensor is not None}
    return list(found.values())


def _grow(model: PreTrainedModel, tokens: int) -> None:
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if tokens > size:
        model.resize_token_embeddings(tokens, pad_to_multiple_of=_MULTIPLE, mean_resizing=False)
        with torch.no_grad():
            for rows in embedding_rows(model):
                rows[size:] = rows[:size].float().mean(dim=0).to(rows.dtype)
