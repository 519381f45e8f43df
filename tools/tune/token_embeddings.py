"""Token embeddings: the embeddings of some tokens as parameters of their own, beside a frozen embedding table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.traits import UnsupportedModel

_INPUT, _OUTPUT = "trained_rows", "trained_output_rows"


def train_token_embeddings(
    model: PreTrainedModel, tokens: Sequence[int], predicted: Sequence[int] = ()
) -> Callable[[], None]:
    """Train the embeddings of these tokens alone; calling the result writes them to the embedding table.

    The table itself stays frozen: its gradient, and that of output embeddings tied to it, would be as large as the table.
    The logits of `predicted`, some of the tokens, are trained as well; all other logits do not change.
    """
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    ids = torch.tensor(sorted(set(tokens)), device=embedding.weight.device)
    rows = _parameter(embedding, _INPUT, embedding.weight, ids)
    scale = getattr(embedding, "embed_scale", 1.0)  # of families whose embedding module scales its output

    def replace(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (given, *_) = arguments
        equal = given[..., None] == ids  # one column per trained token
        own = nn.functional.embedding(equal.to(torch.uint8).argmax(-1), rows) * scale
        return torch.where(equal.any(-1, keepdim=True), own.to(output.dtype), output)

    with torch.no_grad():
        expected = embedding(ids)
        if not torch.allclose(replace(embedding, (ids,), torch.zeros_like(expected)), expected):
            raise UnsupportedModel(
                f"{type(embedding).__name__} is not a table of rows: token embeddings cannot be trained apart; "
                "expected a family with plain token embeddings, or another --method"
            )
    handle = embedding.register_forward_hook(replace)
    merge_output = _train_output(model, ids, rows, predicted) if predicted else _nothing

    def merge() -> None:
        handle.remove()
        with torch.no_grad():
            embedding.weight[ids] = rows.to(embedding.weight.dtype)
        delattr(embedding, _INPUT)
        merge_output()

    return merge


def _train_output(
    model: PreTrainedModel, ids: Tensor, rows: nn.Parameter, predicted: Sequence[int]
) -> Callable[[], None]:
    """Compute the logits of some tokens from trained rows: the input rows where the tables are tied, else own ones."""
    head = cast(nn.Linear, model.get_output_embeddings())
    wanted = torch.tensor(sorted(predicted), device=ids.device)
    tied = head.weight is model.get_input_embeddings().weight
    columns = torch.searchsorted(ids, wanted)
    own = rows if tied else _parameter(head, _OUTPUT, head.weight, wanted)

    def predict(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (hidden, *_) = arguments
        used = own[columns] if tied else own
        bias = None if head.bias is None else head.bias[wanted]
        logits = nn.functional.linear(hidden.to(used.dtype), used, bias)
        return output.index_copy(-1, wanted, logits.to(output.dtype))

    handle = head.register_forward_hook(predict)

    def merge() -> None:
        handle.remove()
        if not tied:
            with torch.no_grad():
                head.weight[wanted] = own.to(head.weight.dtype)
            delattr(head, _OUTPUT)

    return merge


def _parameter(module: nn.Module, name: str, table: Any, ids: Tensor) -> nn.Parameter:
    """A trainable copy of some rows of a table, registered in a module."""
    rows = nn.Parameter(table.detach()[ids].clone())
    module.register_parameter(name, rows)
    return rows


def _nothing() -> None:
    return
