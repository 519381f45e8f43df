"""Methods: which weights a tuning changes, and how what it changed becomes a plain checkpoint again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.gated import ALL_LINEAR, Adapter, gate_model, trainable_parameters
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.vocabulary import embedding_rows


@dataclass(frozen=True)
class Tuned:
    """A model as it is saved: what was added beside its weights is part of them, but for a gated adapter."""

    model: PreTrainedModel
    adapter: Adapter | None


Merge = Callable[[], Tuned]


def apply_method(model: PreTrainedModel, settings: TrainingSettings, new: Sequence[int], masks: Sequence[int]) -> Merge:
    """Let a model's weights learn as a method says; `new` are the ids of the mask, fork and child tokens."""
    if settings.method == "full":
        model.requires_grad_(True)
        return lambda: Tuned(model, None)
    model.requires_grad_(False)
    if settings.method == "gated-lora":
        adapter = gate_model(model, masks, settings.rank, settings.alpha, settings.targets or (ALL_LINEAR,))
        for parameter in trainable_parameters(model):
            parameter.requires_grad_(True)
        _learn_rows(model, masks)  # not those of a [Fork] that the checkpoint has: the text is to stay as it was
        return lambda: Tuned(model, adapter)
    if settings.method == "lora":
        _check_targets(model, settings.targets)
        with warnings.catch_warnings():  # peft asks a model for its checkpointing by a name that transformers gave up
            warnings.simplefilter("ignore", FutureWarning)
            adapted: Any = get_peft_model(model, _lora(settings))
        _learn_rows(model, new)
        return lambda: Tuned(adapted.merge_and_unload(), None)
    _learn_rows(model, new)
    return lambda: Tuned(model, None)


def _lora(settings: TrainingSettings) -> LoraConfig:
    targets: Any = list(settings.targets) or "all-linear"
    alpha: Any = settings.alpha  # peft says int and computes with any number
    return LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    linear = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    missing = sorted(set(targets) - linear)
    if missing:
        raise OptionFault(
            f"--target {missing[0]}: the model has no linear layer of this name: expected {', '.join(sorted(linear))}"
        )


def _learn_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Let the embeddings of these tokens learn, and no other's."""
    for rows in embedding_rows(model):
        chosen = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
        chosen[list(ids)] = True

        def only(gradient: Tensor, chosen: Tensor = chosen) -> Tensor:
            shape = (-1, *(1,) * (gradient.dim() - 1))
            return torch.where(chosen.to(gradient.device).view(shape), gradient, torch.zeros_like(gradient))

        cast(nn.Parameter, rows).requires_grad_(True)
        rows.register_hook(only)  # type: ignore[no-untyped-call]
