"""Output rows: only some rows of the hidden states reach the output embedding, since logits are wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def rows_selected(model: PreTrainedModel, select: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let only some rows reach the output embedding: those that `select` takes of the hidden states, B x T x hidden."""

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden, *others) = arguments
        return (select(hidden), *others)

    handle = cast(nn.Module, model.get_output_embeddings()).register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
