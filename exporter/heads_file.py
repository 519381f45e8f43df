"""Heads file: the file of a checkpoint or adapter folder with the weights of draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_files import HEADS_FILE as HEADS_FILE
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, read_sar_config, write_sar_config
from spaceport.exporter.tensor_file import read_tensors, save_tensors
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.draft_heads import add_heads, expected_shapes
from spaceport.graphs.tensor_names import different_names

MAX_HEADS = 64
_ADVICE = "copy the file that belongs to this folder, or write it again with `spaceport adopt`"


@dataclass(frozen=True)
class HeadsConfig:
    """The number of draft heads, and of residual blocks in each."""

    count: int
    blocks: int


def read_heads(folder: Path, tokens: TokenIds) -> HeadsConfig | None:
    """The draft heads that a folder's sar_config.json names, or None; raises if there are mask tokens too."""
    entry, file = read_sar_config(folder).get("heads"), folder / HEADS_FILE
    if entry is None:
        if file.exists():
            raise CheckpointError(
                f'{file}: {SAR_FILE} has no entry heads for it: expected one such as {{"count": 5, "blocks": 1}}; add it, or '
                "remove the file"
            )
        return None
    if not isinstance(entry, dict) or set(entry) != {"count", "blocks"}:
        raise CheckpointError(f"{folder / SAR_FILE}: heads is {entry!r}: expected null, or count and blocks")
    count, blocks = entry["count"], entry["blocks"]
    if not is_whole(count, 1) or count > MAX_HEADS or not is_whole(blocks, 0) or blocks > MAX_HEADS:
        raise CheckpointError(
            f"{folder / SAR_FILE}: heads is {entry!r}: expected a count of 1 to {MAX_HEADS}, and 0 to {MAX_HEADS} blocks"
        )
    if not file.exists():
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names heads, but there is no {HEADS_FILE}: copy it there, or set the entry to null to "
            "export without them"
        )
    if tokens.mask:
        raise CheckpointError(
            f"{folder}: has {count} heads, and mask tokens {', '.join(map(str, tokens.mask))}: expected one of them, "
            f"which drafts; leave --mask-token out, or remove mask_tokens or heads from {SAR_FILE}"
        )
    return HeadsConfig(count, blocks)


def apply_heads(model: PreTrainedModel, folder: Path, heads: HeadsConfig) -> None:
    """Add the draft heads in a folder to a model."""
    file = folder / HEADS_FILE
    tensors = read_tensors(file, _ADVICE)
    vocab_size, hidden_size = cast(Tensor, model.get_output_embeddings().weight).shape
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = expected_shapes(heads.count, heads.blocks, hidden_size, vocab_size)
    check_shapes(f"{file}", found, expected, _ADVICE)
    if wrong := not_finite(tensors):
        raise CheckpointError(f"{file}: {wrong} has numbers that are not finite; {_ADVICE}")
    add_heads(model, heads.count, heads.blocks, tensors)


def check_shapes(
    where: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], advice: str
) -> None:
    """Raise unless the tensors are exactly those of heads for a base model."""
    if wrong := different_names(found.keys(), expected.keys()):
        raise CheckpointError(f"{where}: {wrong}: expected {len(expected)} of heads; {advice}")
    for name, shape in found.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {shape}: expected {expected[name]}, which the base model has; {advice}"
            )


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with infinities or NaN; None if there is none."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)


def write_heads(folder: Path, heads: HeadsConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write draft heads into a folder: the tensors, and the entry in sar_config.json."""
    save_tensors(folder / HEADS_FILE, tensors)
    write_sar_config(folder, {"heads": {"count": heads.count, "blocks": heads.blocks}})
