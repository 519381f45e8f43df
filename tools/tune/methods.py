"""Methods: which weights are trained, and how adapters are merged into a plain checkpoint."""

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
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.correction import Factors
from spaceport.graphs.gated import ALL_LINEAR, MaskAdapter, gate_model, trainable_parameters, unfold_scale
from spaceport.graphs.input_rows import InputRows
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_embeddings import train_token_embeddings
from spaceport.tools.tune.vocabulary import embedding_rows


@dataclass(frozen=True)
class MergedModel:
    """A model as it is saved: LoRA weights are merged, a gated adapter stays separate."""

    model: PreTrainedModel
    adapter: MaskAdapter | None
    correction: Factors | None = None  # of the drafts of mask slots
    input_rows: InputRows | None = None


Merge = Callable[[], MergedModel]


def apply_method(
    model: PreTrainedModel, settings: TrainingSettings, tokens: TokenIds, existing: MaskAdapter | None = None
) -> Merge:
    """Select the trainable parameters; calling the result merges what was trained.

    With an `existing` adapter, which the model has already, its parameters are trained further.
    """
    new = [*tokens.mask, *tokens.fork_ids, *(() if tokens.child is None else (tokens.child,))]
    if settings.method == "full":
        model.requires_grad_(True)
        return lambda: MergedModel(model, None)
    model.requires_grad_(False)
    if settings.method == "gated-lora":
        if existing is None:
            adapter = gate_model(model, tokens.mask, settings.rank, settings.alpha, settings.targets or (ALL_LINEAR,))
        else:
            adapter = existing
            unfold_scale(model, adapter)
        for parameter in trainable_parameters(model):
            parameter.requires_grad_(settings.drafts)
        forking = settings.forks  # ordinary rows differ behind [Fork] and [Child] only, and in the logits of [Fork]
        merge_embeddings = train_token_embeddings(
            model, new if forking else tokens.mask, tokens.fork_ids if forking else ()
        )

        def merge() -> MergedModel:
            return MergedModel(model, adapter, input_rows=merge_embeddings())

        return merge
    if settings.method == "lora":
        _check_targets(model, settings.targets)
        with warnings.catch_warnings():  # peft uses a deprecated transformers attribute
            warnings.simplefilter("ignore", FutureWarning)
            adapted: Any = get_peft_model(model, _lora(settings))
        _train_rows(model, new)
        return lambda: MergedModel(adapted.merge_and_unload(), None)
    _train_rows(model, new)
    return lambda: MergedModel(model, None)


def _lora(settings: TrainingSettings) -> LoraConfig:
    targets: Any = list(settings.targets) or "all-linear"
    alpha: Any = settings.alpha  # typed int in peft, any number works
    return LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    linear = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    missing = sorted(set(targets) - linear)
    if missing:
        raise OptionFault(
            f"--target {missing[0]}: the model has no linear layer with this name: expected one of {', '.join(sorted(linear))}"
        )


def _train_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Train the embeddings of these tokens only."""
    for rows in embedding_rows(model):
        chosen = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
        chosen[list(ids)] = True

        def mask_gradient(gradient: Tensor, chosen: Tensor = chosen) -> Tensor:
            shape = (-1, *(1,) * (gradient.dim() - 1))
            return torch.where(chosen.to(gradient.device).view(shape), gradient, torch.zeros_like(gradient))

        cast(nn.Parameter, rows).requires_grad_(True)
        rows.register_hook(mask_gradient)  # type: ignore[no-untyped-call]
