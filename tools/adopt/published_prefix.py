"""Published prefix: the key/value pairs and mask embeddings in the file that is published with SSD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.mechanisms import errors_of, require_finite
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.preloaded_slots import PreloadedSlots
from spaceport.tools.adopt.forecast_file import EMBEDDING, PREFIX
from spaceport.tools.adopt.plan import PublishedWeights
from spaceport.tools.adopt.torch_file import read_torch_file

_ADVICE = "copy the file again, or give the base model that it was trained on"
_PAIR = 2  # key and value


def read_published_prefix(file: Path, checkpoint: Checkpoint) -> PublishedWeights:
    """The prefix in a file, checked against the configuration of its base model."""
    slots, embeddings = prefix_tensors(file)
    with errors_of(f"{file}: {PREFIX}", _ADVICE):
        slots.check(checkpoint.config)
        require_finite(slots.state())
    hidden_size = int(checkpoint.config.get_text_config().hidden_size)
    if embeddings.dim() != 2 or not len(embeddings) or embeddings.shape[1] != hidden_size:
        raise CheckpointError(
            f"{file}: {EMBEDDING} has shape {tuple(embeddings.shape)}: expected tokens x {hidden_size}, the size of "
            f"the base model's embeddings; {_ADVICE}"
        )
    if not bool(torch.isfinite(embeddings).all()):
        raise CheckpointError(f"{file}: {EMBEDDING} has numbers that are not finite; {_ADVICE}")
    unused = tuple(sorted(read_torch_file(file).keys() - {PREFIX, EMBEDDING}))
    return published_prefix(file, slots, embeddings, unused, lambda: prefix_tensors(file))


def published_prefix(
    path: Path,
    slots: PreloadedSlots,
    embeddings: Tensor,
    unused: tuple[str, ...],
    read: Callable[[], tuple[PreloadedSlots, Tensor]],
) -> PublishedWeights:
    """A published prefix of key/value pairs; `unused` names further tensors, which the published code does not use."""
    sizes = PreloadedSlots(slots.keys.to("meta"), slots.values.to("meta"))
    report = {"file": str(path), "slots": slots.count, "tokens": len(embeddings), "unused": list(unused)}
    return PublishedWeights("prefix", path, sizes, report, read)


def prefix_tensors(file: Path) -> tuple[PreloadedSlots, Tensor]:
    """The key/value pairs of a file, and its embeddings of mask tokens, tokens x H.

    The published axes are layers x (key, value) x 1 x KV heads x slots x D."""
    tensors = read_torch_file(file)
    for name in (PREFIX, EMBEDDING):
        if name not in tensors:
            raise CheckpointError(f"{file}: has no tensor {name}: expected {PREFIX} and {EMBEDDING}; {_ADVICE}")
    prefix = tensors[PREFIX]
    if prefix.dim() == 6 and prefix.shape[2] == 1:  # a batch of one
        prefix = prefix[:, :, 0]
    if prefix.dim() != 5 or prefix.shape[1] != _PAIR:
        raise CheckpointError(
            f"{file}: {PREFIX} has shape {tuple(tensors[PREFIX].shape)}: expected layers x {_PAIR} x 1 x KV heads x "
            f"slots x head size; {_ADVICE}"
        )
    return PreloadedSlots(prefix[:, 0], prefix[:, 1]), tensors[EMBEDDING]
