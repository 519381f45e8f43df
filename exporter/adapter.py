"""Adapter: a checkpoint's adapter for mask rows, stored in a file beside its unchanged weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_files import ADAPTER_FILE as ADAPTER_FILE
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError, read_sar_config, write_sar_config
from spaceport.exporter.tensor_file import save_tensors
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.gated import Adapter, adapter_state, fold_scale, gate_model, load_adapter

_EXAMPLE = '{"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}'


def read_adapter(folder: Path, tokens: TokenIds) -> Adapter | None:
    """The adapter configuration of a checkpoint folder, checked as far as possible without the model; or None."""
    entry, file = read_sar_config(folder).get("mask_adapter"), folder / ADAPTER_FILE
    if entry is None:
        if file.exists():
            raise CheckpointError(
                f"{file}: {SAR_FILE} has no entry mask_adapter for it: expected an entry such as {_EXAMPLE}; "
                "add it, or remove the file"
            )
        return None
    adapter = _adapter(folder / SAR_FILE, entry)
    if not file.exists():
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names a mask_adapter, but there is no {ADAPTER_FILE}: copy it there, or set the entry "
            "to null to export without it"
        )
    if not tokens.mask:
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names a mask_adapter, but no mask token is known: set one with --mask-token, or as "
            f"mask_tokens in {SAR_FILE}"
        )
    _check_rank(file, adapter.rank)
    return adapter


def apply_adapter(model: PreTrainedModel, folder: Path, mask_ids: tuple[int, ...], adapter: Adapter) -> None:
    """Add the adapter of a checkpoint folder to its model."""
    try:
        gate_model(model, mask_ids, adapter.rank, adapter.alpha, adapter.targets)
        load_adapter(model, load_file(folder / ADAPTER_FILE))
        fold_scale(model)
    except InputFault as error:
        raise CheckpointError(
            f"{folder / ADAPTER_FILE}: {error}; copy the file that belongs to this checkpoint, or correct mask_adapter in "
            f"{SAR_FILE}"
        ) from error


def write_adapter(folder: Path, model: PreTrainedModel, adapter: Adapter) -> None:
    """Write the adapter of a model into a checkpoint folder: the tensors and the entry in sar_config.json."""
    write_tensors(folder, adapter_state(model), adapter)


def write_tensors(folder: Path, state: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Write the tensors of an adapter into a folder, and its entry in sar_config.json."""
    save_tensors(folder / ADAPTER_FILE, state)
    entry = {"rank": adapter.rank, "alpha": adapter.alpha, "targets": list(adapter.targets)}
    write_sar_config(folder, {"mask_adapter": entry})


def _adapter(file: Path, entry: Any) -> Adapter:
    """The adapter configuration in an entry of sar_config.json; raises if the entry is invalid."""
    expected = {"rank", "alpha", "targets"}
    if not isinstance(entry, dict) or set(entry) != expected:
        got = f"has the entries {', '.join(sorted(entry)) or 'none'}" if isinstance(entry, dict) else f"is {entry!r}"
        raise CheckpointError(f"{file}: mask_adapter {got}: expected null, or rank, alpha and targets as in {_EXAMPLE}")
    rank, alpha, targets = entry["rank"], entry["alpha"], entry["targets"]
    if not is_whole(rank, 1):
        raise CheckpointError(f"{file}: rank of mask_adapter is {rank!r}: expected a whole number of at least 1")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise CheckpointError(f"{file}: alpha of mask_adapter is {alpha!r}: expected a number above 0")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(
            f"{file}: targets of mask_adapter are {targets!r}: expected a list of names of linear modules"
        )
    return Adapter(rank, alpha, tuple(targets))


def _check_rank(file: Path, rank: int) -> None:
    """Raise if the file cannot be read or its tensors do not have this rank; reads only the file's header."""
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: copy it again") from error
    for name, shape in shapes.items():
        found = shape[0 if name.endswith(".A") else -1] if len(shape) == 2 else None
        if found != rank:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(shape)}, the rank of mask_adapter in {SAR_FILE} is {rank}: expected rank x "
                "in for A and out x rank for B; correct the rank, or copy the file that belongs to this checkpoint"
            )
