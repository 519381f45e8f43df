"""Embedding rows: the tensors of a model that have one row per vocabulary token."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel


def embedding_tables(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors with one row per vocabulary token by name (input, output, output_bias); tied tensors are listed once."""
    head = model.get_output_embeddings()
    tables = {
        "input": model.get_input_embeddings().weight,
        "output": cast(nn.Linear, head).weight,
        "output_bias": getattr(head, "bias", None),
    }
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tables.items():
        if tensor is not None:
            found.setdefault(id(tensor), (name, cast(Tensor, tensor)))
    return dict(found.values())


def embedding_rows(model: PreTrainedModel) -> list[Tensor]:
    """Tensors with one row per vocabulary token; tied tensors are listed once."""
    return list(embedding_tables(model).values())
