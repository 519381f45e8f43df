"""Mechanisms: with what a model drafts, each stored as an entry in sar_config.json and a file of named tensors."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.exporter.sar_config import (
    SAR_FILE,
    CheckpointError,
    SarConfig,
    read_sar_config,
    tensor_file,
    write_sar_config,
)
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.gated import MaskAdapter
from spaceport.graphs.heads import Heads
from spaceport.graphs.mechanism import Factors, InputRows, Mechanism, MechanismError, Phrases

# By name, in the order in which they are added to a model.
MECHANISMS: dict[str, type[Mechanism]] = {kind.name: kind for kind in (Factors, Phrases, InputRows, MaskAdapter, Heads)}


def read_mechanisms(folder: Path, sar: SarConfig) -> tuple[Mechanism, ...]:
    """The mechanisms of a checkpoint or adapter folder, whose tensors stay in their files until they are used."""
    entries = sar.mechanisms
    if unknown := sorted(entries.keys() - MECHANISMS.keys()):
        raise CheckpointError(f"{folder / SAR_FILE}: mechanisms has {unknown[0]!r}: expected {', '.join(MECHANISMS)}")
    existing = {name: kind for name, kind in MECHANISMS.items() if _exists(folder, name, name in entries)}
    return tuple(_read(folder, kind, entries[name]) for name, kind in existing.items())


def _exists(folder: Path, name: str, named: bool) -> bool:
    """Whether a folder has a mechanism; raises if it has its file alone, or is `named` in sar_config.json alone."""
    file = tensor_file(folder, name)
    if file.exists() and not named:
        raise CheckpointError(
            f"{file}: mechanisms in {SAR_FILE} has no entry {name} for it: expected the entry that belongs to the "
            "file; add it, or remove the file"
        )
    if named and not file.exists():
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names {name}, but there is no {file.name}: copy it there, or set the entry to null "
            "to go on without it"
        )
    return named


def _read(folder: Path, kind: type[Mechanism], entry: object) -> Mechanism:
    file = tensor_file(folder, kind.name)
    tensors = read_tensors(file, advice(kind.name))
    if not tensors:
        raise CheckpointError(f"{file}: has no tensors; {advice(kind.name)}")
    with errors_of(f"{file}", advice(kind.name)):
        return kind.read(
            JsonField(entry, f"{folder / SAR_FILE}: {kind.name}", Rules(CheckpointError, f"; {advice(kind.name)}")),
            tensors,
        )


def check_mechanisms(folder: Path, mechanisms: Sequence[Mechanism], tokens: TokenIds) -> None:
    """Raise for mechanisms that do not fit the mask tokens of their model."""
    for mechanism in mechanisms:
        if mechanism.needs_mask_token and not tokens.mask:
            raise CheckpointError(
                f"{folder}: {SAR_FILE} names {mechanism.name}, which acts on mask rows only, but no mask token is "
                f"known: set one with --mask-token, or as mask_tokens in {SAR_FILE}"
            )
        if mechanism.needs_mask_token is False and tokens.mask:
            raise CheckpointError(
                f"{folder}: has {mechanism.name}, and mask tokens {', '.join(map(str, tokens.mask))}: expected one of "
                f"them, which drafts; leave --mask-token out, or remove mask_tokens or {mechanism.name} from {SAR_FILE}"
            )


def check_values(folder: Path, mechanisms: Sequence[Mechanism]) -> None:
    """Raise for tensors with numbers that are not finite."""
    for mechanism in mechanisms:
        with errors_in(folder, mechanism):
            require_finite(mechanism.state())


def apply_mechanisms(
    model: PreTrainedModel, folder: Path, mechanisms: Sequence[Mechanism], mask_ids: Sequence[int]
) -> None:
    """Add the mechanisms of a folder to its model."""
    for mechanism in mechanisms:
        with errors_in(folder, mechanism):
            mechanism.apply(model, mask_ids)


def write_mechanisms(folder: Path, mechanisms: Sequence[Mechanism]) -> None:
    """Write mechanisms into a folder: the tensors, and the entries in sar_config.json."""
    if not mechanisms:
        return
    for mechanism in mechanisms:
        save_tensors(tensor_file(folder, mechanism.name), mechanism.state())
    entries = {mechanism.name: mechanism.entry for mechanism in mechanisms}
    write_sar_config(folder, {"mechanisms": {**read_sar_config(folder).mechanisms, **entries}})


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors with infinities or NaN."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise MechanismError(f"{name} has numbers that are not finite")


@contextmanager
def errors_of(where: str, what_to_do: str) -> Iterator[None]:
    """Raise an error about tensors as one about the file or folder that has them."""
    try:
        yield
    except CheckpointError:
        raise
    except InputFault as error:
        raise CheckpointError(f"{where}: {error}; {what_to_do}") from error


def errors_in(folder: Path, mechanism: Mechanism) -> AbstractContextManager[None]:
    """Raise an error about the tensors of a mechanism as one about its file."""
    return errors_of(f"{tensor_file(folder, mechanism.name)}", advice(mechanism.name))


def advice(name: str) -> str:
    """What to do about a file that does not fit."""
    return f"copy the file that belongs to this folder, or correct {name} in {SAR_FILE}, or set it to null to go on without it"


def read_tensors(file: Path, what_to_do: str) -> dict[str, Tensor]:
    """The tensors in a file; the error of one that cannot be read says what to do."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {what_to_do}") from error


def tensor_shapes(file: Path, what_to_do: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file by name; only its header is read."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {what_to_do}") from error


def read_pickled_tensors(file: Path, what_to_do: str) -> dict[str, Tensor]:
    """The tensors in a pickle; anything but tensors in it is refused, so no code in it is run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{file}: cannot be read as a file of tensors: {reason}: expected tensors only; {what_to_do}, preferably as *.safetensors"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and type(tensor) in (Tensor, nn.Parameter) for name, tensor in content.items()
    ):
        raise CheckpointError(f"{file}: holds {type(content).__name__}: expected tensors by name; {what_to_do}")
    return content


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file that everybody may read; safetensors itself makes it readable by its owner only."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(0o644)
