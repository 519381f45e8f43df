"""BiTA: a prefix of key/value pairs and mask tokens among the weights of a whole checkpoint, as its authors' code writes it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint, load_tokenizer
from spaceport.exporter.mechanisms import errors_of, require_finite
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.preloaded_slots import PreloadedSlots
from spaceport.tools.adopt.given import Given, check_slots
from spaceport.tools.adopt.new_tokens import new_tokens
from spaceport.tools.adopt.plan import AdoptionPlan, Method, require_no_masks
from spaceport.tools.adopt.published_prefix import published_prefix

_SLOTS, _MASKS = "prompt_num", "mask_num"  # entries of config.json
_EMBEDDING, _MASK_ROWS = "prefix_encoder.embedding.weight", "mask_tokens.weight"  # ends of the names of tensors
_PROJECTION = tuple(f"prefix_encoder.trans.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias"))
_ADVICE = "copy the checkpoint again"


def _recognize(given: Given) -> str | None:
    return f"{_SLOTS} in config.json" if given.adapter is None and given.config.get(_SLOTS) else None


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    require_no_masks(given, checkpoint, "the checkpoint has mask tokens of its own")
    slots, rows = _prefix_of(given, checkpoint)
    named = _whole(given, _MASKS)
    if len(rows) not in (1, named):
        raise CheckpointError(
            f"{given.checkpoint}: {_MASK_ROWS} has {len(rows)} rows: expected 1, or {named} as {_MASKS} in config.json; {_ADVICE}"
        )
    most = min(named, MAX_MASK_SLOTS)
    count = given.request.max_mask_slots or most
    check_slots(count, most)
    masks = new_tokens(given, load_tokenizer(checkpoint), BITA.name, count if len(rows) > 1 else 1)
    prefix = published_prefix(given.checkpoint, slots, rows, (), lambda: _prefix_of(given, checkpoint))
    return AdoptionPlan(BITA.name, evidence, given.checkpoint, masks, count, prefix)


def _prefix_of(given: Given, checkpoint: Checkpoint) -> tuple[PreloadedSlots, Tensor]:
    """The key/value pairs, and the embeddings of mask tokens."""
    tensors = _tensors(given.checkpoint)
    text = checkpoint.config.get_text_config()
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    count = _whole(given, _SLOTS)
    rows = tensors[_EMBEDDING].float()
    if given.config.get("prefix_projection"):
        first, first_bias, second, second_bias = (_named(tensors, name, given).float() for name in _PROJECTION)
        if rows.shape[1:] != first.shape[1:] or first.shape[:1] != second.shape[1:]:
            raise CheckpointError(
                f"{given.checkpoint}: {_EMBEDDING} and the weights of {_PROJECTION[0]} and {_PROJECTION[2]} have the shapes "
                f"{tuple(rows.shape)}, {tuple(first.shape)} and {tuple(second.shape)}: expected a chain of sizes; {_ADVICE}"
            )
        rows = torch.tanh(rows @ first.T + first_bias) @ second.T + second_bias
    if rows.shape != (count, layers * 2 * hidden):
        raise CheckpointError(
            f"{given.checkpoint}: its prefix has the shape {tuple(rows.shape)}: expected {count} x {layers * 2 * hidden}, which "
            f"are {_SLOTS} in config.json, and keys and values of {layers} layers with {hidden} numbers; {_ADVICE}"
        )
    heads = int(text.num_attention_heads)  # also with fewer KV heads
    pairs = rows.reshape(count, layers, 2, heads, hidden // heads).permute(1, 2, 3, 0, 4).contiguous()
    slots = PreloadedSlots(pairs[:, 0], pairs[:, 1])
    with errors_of(f"{given.checkpoint}: its prefix", _ADVICE):
        slots.check(checkpoint.config)
        require_finite(slots.state())
    masks = _named(tensors, _MASK_ROWS, given)
    if masks.dim() != 2 or masks.shape[1] != hidden or not bool(torch.isfinite(masks).all()):
        raise CheckpointError(
            f"{given.checkpoint}: {_MASK_ROWS} has the shape {tuple(masks.shape)}: expected finite numbers, tokens x {hidden}; "
            f"{_ADVICE}"
        )
    return slots, masks


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the prefix and of the mask tokens, by the ends of their names."""
    found: dict[str, Tensor] = {}
    ends = (_EMBEDDING, _MASK_ROWS, *_PROJECTION)
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    end = next((end for end in ends if name.endswith(f".{end}")), None)
                    if end is not None:
                        found[end] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}: {_ADVICE}") from error
    if _EMBEDDING not in found:
        raise CheckpointError(
            f"{folder}: config.json has {_SLOTS}, and no tensor is named {_EMBEDDING}: expected one in its safetensors files; "
            f"{_ADVICE}, and convert pickled weights to safetensors"
        )
    return found


def _named(tensors: dict[str, Tensor], name: str, given: Given) -> Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"{given.checkpoint}: no tensor is named {name}: expected one beside {_EMBEDDING}; {_ADVICE}"
        )
    return tensors[name]


def _whole(given: Given, entry: str) -> int:
    value = given.config.get(entry)
    if not is_whole(value, 1):
        raise CheckpointError(
            f"{given.checkpoint / 'config.json'}: {entry} is {value!r}: expected a whole number from 1 on"
        )
    return cast(int, value)


BITA = Method(
    "bita",
    "BiTA: a prefix that only mask rows see",
    _recognize,
    _plan,
    f"{_SLOTS} in the config.json of a whole checkpoint",
)
