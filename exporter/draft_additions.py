"""Draft additions: the tensors that an adapter, heads or preloaded slots add to a base model, by their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.checkpoint_files import FACTORS_FILE, INPUT_ROWS_FILE
from spaceport.exporter.heads_file import HeadsConfig
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.draft_heads import add_heads, expected_shapes
from spaceport.graphs.gated import Adapter, gate_model
from spaceport.graphs.preloaded_slots import PreloadedSlots, add_preloaded_slots


@dataclass(frozen=True)
class DraftAdditions:
    """What drafts add to a base model."""

    mask_ids: tuple[int, ...]
    vocab_size: int  # embedding rows with those of new tokens
    adapter: Adapter | None
    heads: HeadsConfig | None
    preloaded: tuple[int, ...] | None = None  # shape of the keys of preloaded slots, which is that of their values


def added_by(checkpoint: Checkpoint) -> DraftAdditions:
    """What the adapter folder of a checkpoint adds to its base model; raises for tensors that are not counted."""
    folder = checkpoint.adapter_folder
    if folder is None:
        raise ValueError("the checkpoint has no adapter folder: expected one, whose additions are counted")
    for found, file in ((checkpoint.correction, FACTORS_FILE), (checkpoint.input_rows, INPUT_ROWS_FILE)):
        if found is not None:
            raise CheckpointError(
                f"{folder.path / file}: has tensors that --dry-run does not count: expected an adapter, heads or preloaded "
                "slots only; run it without --adapter"
            )
    slots = checkpoint.preloaded
    return DraftAdditions(
        checkpoint.tokens.mask,
        folder.vocab_size,
        checkpoint.adapter,
        checkpoint.heads,
        None if slots is None else tuple(slots.keys.shape),
    )


def add_without_values(model: PreTrainedModel, additions: DraftAdditions) -> None:
    """Add the tensors to a model on torch's meta device, which stores shapes only."""
    if cast(nn.Embedding, model.get_input_embeddings()).num_embeddings < additions.vocab_size:
        model.resize_token_embeddings(additions.vocab_size, mean_resizing=False)
    adapter, heads = additions.adapter, additions.heads
    if adapter is not None:
        gate_model(model, additions.mask_ids, adapter.rank, adapter.alpha, adapter.targets)
    if heads is not None:
        vocab_size, hidden_size = cast(nn.Linear, model.get_output_embeddings()).weight.shape
        shapes = expected_shapes(heads.count, heads.blocks, hidden_size, vocab_size)
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        add_heads(model, heads.count, heads.blocks, tensors)
    if additions.preloaded is not None:
        keys, values = (torch.empty(additions.preloaded, device="meta") for _ in range(2))
        add_preloaded_slots(model, additions.mask_ids, PreloadedSlots(keys, values))
