"""Token embeddings: the embeddings of some tokens as parameters of their own, beside a frozen embedding table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.input_rows import InputRows, embedding_scale, replace_rows
from spaceport.graphs.traits import UnsupportedModel

_INPUT, _OUTPUT = "trained_rows", "trained_output_rows"


def train_token_embeddings(
    model: PreTrainedModel, tokens: Sequence[int], predicted: Sequence[int] = ()
) -> Callable[[], InputRows | None]:
    """Train the embeddings of these tokens alone; calling the result writes them to the embedding table.

    The table itself stays frozen: its gradient, and that of output embeddings tied to it, would be as large as the table.
    The logits of `predicted`, some of the tokens, are trained as well; all other logits do not change. If the tables are
    tied, the table gets the output embeddings of these tokens, and the result of the call has their input embeddings.
    """
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = cast(nn.Linear, model.get_output_embeddings()).weight is embedding.weight
    chosen = tuple(sorted(set(tokens)))
    apart = tuple(sorted(predicted)) if tied else ()
    ids = torch.tensor(chosen, device=embedding.weight.device)
    with torch.no_grad():
        expected = embedding(ids)  # of a model with input rows: these
        rows = _parameter(embedding, _INPUT, (expected / embedding_scale(embedding)).to(embedding.weight.dtype))
        handle = replace_rows(embedding, chosen, _INPUT)
        plain = embedding.weight[ids] * embedding_scale(embedding)
        if not torch.allclose(embedding(ids), expected) or plain.shape != expected.shape:
            raise UnsupportedModel(
                f"{type(embedding).__name__} is not a table of rows: token embeddings cannot be trained apart; "
                "expected a family with plain token embeddings, or another --method"
            )
    merge_output = _train_output(model, predicted) if predicted else _nothing

    def merge() -> InputRows | None:
        handle.remove()
        trained = rows.detach().clone()
        with torch.no_grad():
            embedding.weight[ids] = trained.to(embedding.weight.dtype)
        delattr(embedding, _INPUT)
        merge_output()
        return InputRows(apart, trained[[chosen.index(token) for token in apart]]) if apart else None

    return merge


def _train_output(model: PreTrainedModel, predicted: Sequence[int]) -> Callable[[], None]:
    """Compute the logits of some tokens from trained rows; calling the result writes them to the table."""
    head = cast(nn.Linear, model.get_output_embeddings())
    wanted = torch.tensor(sorted(predicted), device=head.weight.device)
    own = _parameter(head, _OUTPUT, head.weight[wanted])

    def predict(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (hidden, *_) = arguments
        bias = None if head.bias is None else head.bias[wanted]
        logits = nn.functional.linear(hidden.to(own.dtype), own, bias)
        return output.index_copy(-1, wanted, logits.to(output.dtype))

    handle = head.register_forward_hook(predict)

    def merge() -> None:
        handle.remove()
        with torch.no_grad():
            head.weight[wanted] = own.to(head.weight.dtype)
        delattr(head, _OUTPUT)

    return merge


def _parameter(module: nn.Module, name: str, rows: Any) -> nn.Parameter:
    """A trainable copy of some rows of a table, registered in a module."""
    own = nn.Parameter(rows.detach().clone())
    module.register_parameter(name, own)
    return own


def _nothing() -> None:
    return
