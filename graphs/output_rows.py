"""Output rows: compute logits only for the rows that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def rows_selected(model: PreTrainedModel, select: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass only the rows that `select` returns from the hidden states (B x T x hidden) to the output embedding."""

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden, *others) = arguments
        return (select(hidden), *others)

    handle = cast(nn.Module, model.get_output_embeddings()).register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
