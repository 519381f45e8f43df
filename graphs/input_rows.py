"""Input rows: input embeddings of single tokens that differ from their rows in the embedding table.

Tied embeddings have one row for two purposes: the token's meaning as an input, and its logit as an output. A token that is
trained beside a frozen model, such as [Fork], needs two rows: the table keeps the one of its logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_BUFFER = "input_rows"


class InputRows(NamedTuple):
    """Tokens and their input embeddings, N x H."""

    tokens: tuple[int, ...]
    rows: Tensor


def use_input_rows(model: PreTrainedModel, given: InputRows) -> None:
    """Let a model read the input embeddings of some tokens from these rows instead of its embedding table."""
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    rows = given.rows.to(embedding.weight)
    embedding.register_buffer(_BUFFER, rows, persistent=False)  # stored in a file of its own
    replace_rows(embedding, given.tokens, _BUFFER)


def replace_rows(embedding: nn.Embedding, tokens: tuple[int, ...], name: str) -> RemovableHandle:
    """Replace the output of an embedding for some tokens by the rows in its attribute `name`."""
    scale = embedding_scale(embedding)

    def replace(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        (ids, *_) = arguments
        for token, row in zip(tokens, getattr(module, name) * scale, strict=True):
            output = torch.where((ids == token)[..., None], row.to(output.dtype), output)
        return output

    return embedding.register_forward_hook(replace)


def embedding_scale(embedding: nn.Embedding) -> float | Tensor:
    """The factor of families whose embedding module scales its output, else 1."""
    return cast("float | Tensor", getattr(embedding, "embed_scale", 1.0))
