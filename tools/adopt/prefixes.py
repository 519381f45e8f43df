"""Prefixes: key/value pairs that only mask rows see, with mask tokens, as SSD and BiTA publish them."""

from __future__ import annotations

from collections.abc import Callable
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
from spaceport.tools.adopt.given import EMBEDDING, PREFIX, Given, check_slots, forecast_file
from spaceport.tools.adopt.plan import (
    AdoptionPlan,
    Method,
    PublishedWeights,
    new_tokens,
    read_torch_file,
    require_no_masks,
)

_COPY_OR_BASE = "copy the file again, or give the base model that it was trained on"
_PAIR = 2  # key and value


def read_published_prefix(file: Path, checkpoint: Checkpoint) -> PublishedWeights:
    """The prefix in a file, checked against the configuration of its base model."""
    slots, embeddings = prefix_tensors(file)
    with errors_of(f"{file}: {PREFIX}", _COPY_OR_BASE):
        slots.check(checkpoint.config)
        require_finite(slots.state())
    hidden_size = int(checkpoint.config.get_text_config().hidden_size)
    if embeddings.dim() != 2 or not len(embeddings) or embeddings.shape[1] != hidden_size:
        raise CheckpointError(
            f"{file}: {EMBEDDING} has shape {tuple(embeddings.shape)}: expected tokens x {hidden_size}, the size of "
            f"the base model's embeddings; {_COPY_OR_BASE}"
        )
    if not bool(torch.isfinite(embeddings).all()):
        raise CheckpointError(f"{file}: {EMBEDDING} has numbers that are not finite; {_COPY_OR_BASE}")
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
            raise CheckpointError(f"{file}: has no tensor {name}: expected {PREFIX} and {EMBEDDING}; {_COPY_OR_BASE}")
    prefix = tensors[PREFIX]
    if prefix.dim() == 6 and prefix.shape[2] == 1:  # a batch of one
        prefix = prefix[:, :, 0]
    if prefix.dim() != 5 or prefix.shape[1] != _PAIR:
        raise CheckpointError(
            f"{file}: {PREFIX} has shape {tuple(tensors[PREFIX].shape)}: expected layers x {_PAIR} x 1 x KV heads x "
            f"slots x head size; {_COPY_OR_BASE}"
        )
    return PreloadedSlots(prefix[:, 0], prefix[:, 1]), tensors[EMBEDDING]


def _file(given: Given) -> Path | None:
    return forecast_file(given.adapter or given.checkpoint)


def _recognize_ssd(given: Given) -> str | None:
    file = _file(given)
    return None if file is None else f"{PREFIX} in {file.name}"


def _plan_ssd(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    file = _file(given)
    if file is None:
        raise ValueError("no file with a forecast prefix: expected one, by which the method was recognized")
    require_no_masks(given, checkpoint, "the file of SSD has mask tokens of its own")
    prefix = read_published_prefix(file, checkpoint)
    most = min(prefix.report["tokens"], MAX_MASK_SLOTS)
    slots = given.request.max_mask_slots or most
    check_slots(slots, most)
    masks = new_tokens(given, load_tokenizer(checkpoint), "forecast", slots)
    return AdoptionPlan(SSD, evidence, checkpoint, masks, slots, prefix)


SSD = Method(
    "ssd",
    _recognize_ssd,
    _plan_ssd,
    f"a file of torch (*.pt) with the tensor {PREFIX}",
)


_SLOTS, _MASKS = "prompt_num", "mask_num"  # entries of config.json
_EMBEDDING, _MASK_ROWS = "prefix_encoder.embedding.weight", "mask_tokens.weight"  # ends of the names of tensors
_PROJECTION = tuple(f"prefix_encoder.trans.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias"))
_ADVICE = "copy the checkpoint again"


def _recognize_bita(given: Given) -> str | None:
    return f"{_SLOTS} in config.json" if given.adapter is None and given.config.get(_SLOTS) else None


def _plan_bita(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
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
    return AdoptionPlan(BITA, evidence, checkpoint, masks, count, prefix)


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
    _recognize_bita,
    _plan_bita,
    f"{_SLOTS} in the config.json of a whole checkpoint",
)
