"""Preloaded slots file: the file of a checkpoint or adapter folder with key/value pairs that only mask rows see."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.exporter.checkpoint_files import prefix_file
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, write_sar_config
from spaceport.exporter.tensor_file import read_tensors, save_tensors
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.preloaded_slots import PreloadedSlots, add_preloaded_slots

PRELOADED_FILE = "preloaded_slots.safetensors"  # the name with which it is written
_ADVICE = "copy the file that belongs to this folder, or set prefix to null to go on without it"


def read_preloaded_slots(folder: Path, config: PreTrainedConfig, tokens: TokenIds) -> PreloadedSlots | None:
    """The preloaded slots of a folder, checked against the configuration of its model; None if it has none."""
    file = prefix_file(folder)
    if file is None:
        return None
    if not file.exists():
        raise CheckpointError(f"{folder}: {SAR_FILE} names the prefix {file.name}, which is not there: {_ADVICE}")
    if not tokens.mask:
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names a prefix, which only mask rows see, but no mask token is known: set one with "
            f"--mask-token, or as mask_tokens in {SAR_FILE}"
        )
    tensors = read_tensors(file, _ADVICE)
    if tensors.keys() != {"keys", "values"}:
        raise CheckpointError(
            f"{file}: has the tensors {', '.join(sorted(tensors))}: expected keys and values; {_ADVICE}"
        )
    slots = PreloadedSlots(tensors["keys"], tensors["values"])
    check_slots(f"{file}", slots, config, _ADVICE)
    return slots


def apply_preloaded_slots(model: PreTrainedModel, folder: Path, tokens: TokenIds, slots: PreloadedSlots) -> None:
    """Let the mask rows of a model see the preloaded slots of a folder."""
    if not all(bool(torch.isfinite(tensor.to(model.dtype)).all()) for tensor in slots.tensors):
        raise CheckpointError(
            f"{prefix_file(folder)}: has numbers beyond the range of {str(model.dtype).removeprefix('torch.')}: export with "
            "--dtype bfloat16 or float32"
        )
    add_preloaded_slots(model, tokens.mask, slots)


def check_slots(where: str, slots: PreloadedSlots, config: PreTrainedConfig, advice: str) -> None:
    """Raise unless preloaded slots have the sizes of a model with this configuration, and finite numbers."""
    text = config.get_text_config()
    queries = int(text.num_attention_heads)
    heads = sorted({int(getattr(text, "num_key_value_heads", None) or queries), queries})
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
    found = [tuple(tensor.shape) for tensor in slots.tensors]
    expected = [text.num_hidden_layers, " or ".join(map(str, heads)), "slots", dim]
    shape = found[0]
    fits = len(shape) == 4 and shape[0] == expected[0] and shape[1] in heads and shape[2] > 0 and shape[3] == dim
    if not fits or found[1] != shape:
        raise CheckpointError(
            f"{where}: has keys of shape {found[0]} and values of shape {found[1]}: expected {' x '.join(map(str, expected))} "
            f"for both, which are layers, heads, slots and head size of the model; {advice}"
        )
    if not all(bool(torch.isfinite(tensor).all()) for tensor in slots.tensors):
        raise CheckpointError(f"{where}: has numbers that are not finite; {advice}")


def write_preloaded_slots(folder: Path, slots: PreloadedSlots) -> None:
    """Write preloaded slots into a folder: the tensors, and the entry in sar_config.json."""
    save_tensors(folder / PRELOADED_FILE, {"keys": slots.keys, "values": slots.values})
    write_sar_config(folder, {"prefix": PRELOADED_FILE})
