"""Saving: a tuned model as a checkpoint folder that is exported as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from spaceport.exporter.adapter import write_adapter
from spaceport.exporter.atomic_folder import FolderKind
from spaceport.exporter.sar_config import write_sar_config
from spaceport.graphs.gated import base_state
from spaceport.tools.tune.methods import Tuned
from spaceport.tools.tune.subject import Subject

CHECKPOINT = FolderKind("checkpoint", "config.json")

_GENERATION_FILE = "generation_config.json"


def write_checkpoint(folder: Path, subject: Subject, tuned: Tuned, state: Mapping[str, Tensor] | None) -> torch.dtype:
    """Fill a folder with a tuned model, its tokenizer and what says how it drafts and forks; the type of its weights.

    `state` are the weights where the processes of a training each hold a part of them.
    """
    model = tuned.model
    dtype = _holding((model.state_dict() if state is None else state).values(), subject.dtype)
    told = model.generation_config
    # The checkpoint's own file is copied: saving would hold it to rules that it may have been written before.
    model.generation_config = GenerationConfig(eos_token_id=list(subject.tokens.end))
    model.to(dtype)  # type: ignore[arg-type]
    if tuned.adapter is not None:
        state = base_state(model)
    model.save_pretrained(folder, state_dict=None if state is None else _cast(state, dtype))
    model.generation_config = told
    subject.tokenizer.save_pretrained(folder)
    own = subject.folder / _GENERATION_FILE
    if own.exists():
        shutil.copyfile(own, folder / _GENERATION_FILE)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes for the owner alone
    write_sar_config(
        folder,
        {
            "mask_tokens": list(subject.names.masks),
            "mask_slots": subject.mask_slots or None,
            "fork_token": subject.names.fork,
            "child_token": subject.names.child,
        },
    )
    if tuned.adapter is not None:
        write_adapter(folder, model, tuned.adapter)
    return dtype


def _holding(weights: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """A checkpoint's own type, or float32 where that is too narrow for what was learned: float16 ends at 65,504."""
    most = torch.finfo(dtype).max
    found = (float(tensor.abs().max()) for tensor in weights if tensor.is_floating_point() and tensor.numel())
    return dtype if all(largest <= most for largest in found) else torch.float32


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A state in another type; tensors that share their memory still do, so that tied weights are written once."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: made.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype)) for name, tensor in state.items()
    }
