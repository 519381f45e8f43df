"""Mask embeddings: the input embeddings of the mask tokens as parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.traits import UnsupportedModel

_NAME = "mask_rows"


def train_mask_embeddings(model: PreTrainedModel, masks: Sequence[int]) -> Callable[[], None]:
    """Train the embeddings of the mask tokens alone; calling the result writes them to the embedding table.

    The table itself stays frozen: its gradient, and that of output embeddings tied to it, would be as large as the table.
    """
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    ids = torch.tensor(sorted(set(masks)), device=embedding.weight.device)
    rows = nn.Parameter(embedding.weight.detach()[ids].clone())
    embedding.register_parameter(_NAME, rows)
    scale = getattr(embedding, "embed_scale", 1.0)  # of families whose embedding module scales its output

    def replace(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (tokens, *_) = arguments
        equal = tokens[..., None] == ids  # one column per mask token
        own = nn.functional.embedding(equal.to(torch.uint8).argmax(-1), rows) * scale
        return torch.where(equal.any(-1, keepdim=True), own.to(output.dtype), output)

    with torch.no_grad():
        expected = embedding(ids)
        if not torch.allclose(replace(embedding, (ids,), torch.zeros_like(expected)), expected):
            raise UnsupportedModel(
                f"{type(embedding).__name__} is not a table of rows: mask embeddings cannot be trained apart; "
                "expected a family with plain token embeddings, or another --method"
            )
    handle = embedding.register_forward_hook(replace)

    def merge() -> None:
        handle.remove()
        with torch.no_grad():
            embedding.weight[ids] = rows.to(embedding.weight.dtype)
        delattr(embedding, _NAME)

    return merge
