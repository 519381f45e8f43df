"""Heads: the published heads of Medusa over the last hidden state, checked against a base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.draft_files import errors_of, read_pickled_tensors, read_tensors, require_finite, tensor_shapes
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.heads import Heads, expected_shapes
from spaceport.graphs.mechanism import require_shapes
from spaceport.tools.adopt.plan import HEADS_FILES, AdoptionPlan, Given, Method, PublishedWeights

_EMBEDDED = "medusa_head."  # prefix of the heads' tensors among those of a whole checkpoint
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_ADVICE = "copy the file again"
_WRONG_BASE = "give the base model that the heads were trained on"


def heads_files(given: Given) -> list[Path]:
    """The files with heads: one beside its config.json, or the weight files of a checkpoint; empty: there are none."""
    folder = given.owner
    own = next((folder / name for name in HEADS_FILES if (folder / name).exists()), None)
    if own is not None:
        return [own]
    whole = given.adapter is None and given.config.get("medusa_num_heads")
    return sorted(folder.glob("model*.safetensors")) if whole else []


def read_published_heads(given: Given, checkpoint: Checkpoint) -> PublishedWeights:
    """The heads in the given files, checked against the configuration of their base model."""
    folder = given.owner
    files: dict[Path, dict[str, str]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for file in heads_files(given):
        names = {}
        for name, shape in _shapes(file).items():
            embedded = name.startswith(_EMBEDDED)
            if embedded or file.name in HEADS_FILES:
                names[name] = name.removeprefix(_EMBEDDED)
                found[names[name]] = shape
        if names:
            files[file] = names
    where = ", ".join(map(str, files)) or f"{folder}"
    present, blocks = _sizes(where, found)
    _check_config(folder / "config.json", given.config, present, blocks)
    text = checkpoint.config.get_text_config()
    expected = expected_shapes(present, blocks, text.hidden_size, text.vocab_size)
    base = given.config.get("base_model_name_or_path")
    named = f", which config.json calls {base}" if isinstance(base, str) else ""
    with errors_of(where, f"{_ADVICE}, or {_WRONG_BASE}{named}"):
        require_shapes(found, expected, "of heads")
    count = given.request.max_mask_slots or present
    if count > present:
        raise CheckpointError(f"--max-mask-slots is {count}: expected 1 to {present}, the heads in the file")
    taken = {
        file: {name: own for name, own in names.items() if int(own.split(".")[0]) < count}
        for file, names in files.items()
    }
    configured = given.config.get("medusa_num_heads")
    files = {file: names for file, names in taken.items() if names}
    report = {
        "files": [str(file) for file in files],
        "named_base": base if isinstance(base, str) else None,
        "count": count,
        "blocks": blocks,
        "present": present,
        "configured": configured if isinstance(configured, int) else None,
    }
    return PublishedWeights("heads", next(iter(files)), report, lambda: Heads(count, blocks, _tensors(files)))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".pt":
        return {name: tuple(tensor.shape) for name, tensor in read_pickled_tensors(file, _ADVICE).items()}
    return tensor_shapes(file, _ADVICE)


def _tensors(files: Mapping[Path, Mapping[str, str]]) -> dict[str, Tensor]:
    """The tensors of the heads by name, in one type."""
    tensors: dict[str, Tensor] = {}
    for file, names in files.items():
        read = read_pickled_tensors if file.suffix == ".pt" else read_tensors
        stored = read(file, _ADVICE)
        tensors |= {own: stored[name] for name, own in names.items()}
        with errors_of(f"{file}", _ADVICE):
            require_finite(tensors)
    types = {tensor.dtype for tensor in tensors.values()}
    dtype = types.pop() if len(types) == 1 else torch.float32
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _sizes(where: str, found: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """The number of heads, and of residual blocks in each, by the names of the tensors."""
    heads, outputs = set(), set()
    for name in found:
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{where}: has the tensor {name}: expected names such as 0.0.linear.weight and 0.1.weight; {_ADVICE}"
            )
        heads.add(int(match[1]))
        if match[3] == "weight":
            outputs.add(int(match[2]))
    if not heads or heads != set(range(len(heads))) or len(outputs) != 1:
        raise CheckpointError(
            f"{where}: has the heads {sorted(heads)} with output matrices at {sorted(outputs)}: expected the heads 0, "
            f"1, ... with one output matrix each, such as 0.1.weight behind 0.0.linear.weight; {_ADVICE}"
        )
    return len(heads), outputs.pop()


def _check_config(file: Path, config: Mapping[str, Any], present: int, blocks: int) -> None:
    """Raise if config.json names more heads than there are, or another number of blocks.

    It may name fewer: those of the published heads for Vicuna name 2, and the files have 5.
    """
    count, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    if count is not None and (not is_whole(count, 1) or count > present):
        raise CheckpointError(
            f"{file}: medusa_num_heads is {count!r}: expected 1 to {present}, the heads in the file; {_ADVICE}"
        )
    if layers is not None and layers != blocks:
        raise CheckpointError(
            f"{file}: medusa_num_layers is {layers!r}: expected {blocks}, the residual blocks of each head in the "
            f"file; {_ADVICE}"
        )


def _recognize(given: Given) -> str | None:
    files = heads_files(given)
    if not files:
        return None
    return files[0].name if len(files) == 1 and given.adapter is not None else "medusa_num_heads in config.json"


def _plan(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    if checkpoint.tokens.mask:
        raise CheckpointError(
            f"{given.checkpoint}: has mask tokens, which draft already: expected a base model without them"
        )
    heads = read_published_heads(given, checkpoint)
    return AdoptionPlan(MEDUSA.name, evidence, checkpoint, {}, 0, heads)


MEDUSA = Method("medusa", _recognize, _plan, "heads draft without mask tokens")
