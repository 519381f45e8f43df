"""Methods: which weights are trained, and how they become those of a plain checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.gated import (
    ALL_LINEAR,
    MaskAdapter,
    checkpoint_layers,
    gate_model,
    trainable_parameters,
    unfold_scale,
)
from spaceport.graphs.mechanism import DraftCorrection, Factors, InputRows, Phrases, embedding_scale, replace_rows
from spaceport.graphs.traits import UnsupportedModel
from spaceport.training.packed_model import PackedModel, frozen_base_model_of
from spaceport.training.settings import DEFAULT_MASK_SLOTS, TrainingSettings, TuningJob
from spaceport.training.tunable_model import TunableModel, embedding_rows

_INPUT, _OUTPUT = "trained_rows", "trained_output_rows"


def train_token_embeddings(
    model: PreTrainedModel, tokens: Sequence[int], predicted: Sequence[int] = ()
) -> Callable[[], InputRows | None]:
    """Train the embeddings of these tokens alone; calling the result writes them to the embedding table.

    The table itself stays frozen: its gradient, and that of output embeddings tied to it, would be as large as the table.
    The logits of `predicted`, some of the tokens, are trained as well; all other logits do not change. If the tables are
    tied, the table gets the output embeddings of these tokens, and the result of the call has their input embeddings.
    """
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = cast(nn.Linear, model.get_output_embeddings()).weight is embedding.weight
    chosen = tuple(sorted(set(tokens)))
    apart = tuple(sorted(predicted)) if tied else ()
    ids = torch.tensor(chosen, device=embedding.weight.device)
    with torch.no_grad():
        expected = embedding(ids)  # of a model with input rows: these
        rows = _parameter(embedding, _INPUT, (expected / embedding_scale(embedding)).to(embedding.weight.dtype))
        handle = replace_rows(embedding, chosen, _INPUT)
        plain = embedding.weight[ids] * embedding_scale(embedding)
        if not torch.allclose(embedding(ids), expected) or plain.shape != expected.shape:
            raise UnsupportedModel(
                f"{type(embedding).__name__} is not a table of rows: token embeddings cannot be trained apart; "
                "expected a family with plain token embeddings, or another --method"
            )
    merge_output = _train_output(model, predicted) if predicted else _nothing

    def merge() -> InputRows | None:
        handle.remove()
        trained = rows.detach().clone()
        with torch.no_grad():
            embedding.weight[ids] = trained.to(embedding.weight.dtype)
        delattr(embedding, _INPUT)
        merge_output()
        return InputRows(apart, trained[[chosen.index(token) for token in apart]]) if apart else None

    return merge


def _train_output(model: PreTrainedModel, predicted: Sequence[int]) -> Callable[[], None]:
    """Compute the logits of some tokens from trained rows; calling the result writes them to the table."""
    head = cast(nn.Linear, model.get_output_embeddings())
    wanted = torch.tensor(sorted(predicted), device=head.weight.device)
    own = _parameter(head, _OUTPUT, head.weight[wanted])

    def predict(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (hidden, *_) = arguments
        bias = None if head.bias is None else head.bias[wanted]
        logits = nn.functional.linear(hidden.to(own.dtype), own, bias)
        return output.index_copy(-1, wanted, logits.to(output.dtype))

    handle = head.register_forward_hook(predict)

    def merge() -> None:
        handle.remove()
        with torch.no_grad():
            head.weight[wanted] = own.to(head.weight.dtype)
        delattr(head, _OUTPUT)

    return merge


def _parameter(module: nn.Module, name: str, rows: Any) -> nn.Parameter:
    """A trainable copy of some rows of a table, registered in a module."""
    own = nn.Parameter(rows.detach().clone())
    module.register_parameter(name, own)
    return own


def _nothing() -> None:
    return


def convert_frozen(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Convert the parameters without gradients; calling the result restores their exact values."""
    originals: dict[nn.Parameter, Tensor] = {
        parameter: parameter.data
        for parameter in model.parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    for parameter, values in originals.items():
        parameter.data = values.to(dtype)

    def restore() -> None:
        for parameter, values in originals.items():
            parameter.data = values.to(parameter.device)

    return restore


@dataclass(frozen=True)
class MergedModel:
    """A model as it is saved: LoRA weights are merged, a gated adapter stays separate."""

    model: PreTrainedModel
    adapter: MaskAdapter | None
    correction: Factors | None = None  # of the drafts of mask slots
    input_rows: InputRows | None = None
    phrases: Phrases | None = None


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


def adapter_settings(settings: TrainingSettings, checkpoint: Checkpoint) -> TrainingSettings:
    """The settings with those of the mask slots, the adapter and the draft correction of a checkpoint."""
    adapter, correction = checkpoint.mechanism(MaskAdapter), checkpoint.mechanism(Factors)
    layout = checkpoint.drafts.layout
    shift, group = settings.shift, settings.group
    slots = settings.mask_slots or checkpoint.drafts.mask_slots or DEFAULT_MASK_SLOTS
    shift = layout.shift if shift is None else shift
    settings = replace(settings, mask_slots=slots, shift=shift, group=group or layout.group)
    if correction is not None and settings.drafts:
        if settings.correction_rank not in (0, correction.rank):
            raise OptionFault(
                f"--correction-rank is {settings.correction_rank}, the draft correction that is trained further has rank "
                f"{correction.rank}: leave the option out"
            )
        settings = replace(settings, correction_rank=correction.rank)
    if adapter is None:
        return settings
    return replace(settings, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)


def select_parameters(
    job: TuningJob, tunable: TunableModel, packed_model: PackedModel, accelerator: Accelerator
) -> tuple[PackedModel, Merge]:
    """The model that trains the method's parameters and the draft correction, and the function that merges them at the end."""
    settings, model = job.settings, tunable.model
    whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in whole and settings.method != "full":
        raise OptionFault(
            f"--method {settings.method} under {accelerator.distributed_type.value}: sharded weights support only "
            "--method full; expected that, or processes that each hold the whole model"
        )
    merge = apply_method(model, settings, tunable.tokens, tunable.checkpoint.mechanism(MaskAdapter))
    restore, correction, known = _nothing, None, tunable.checkpoint.mechanism(Factors)
    if job.recompute:
        checkpoint_layers(model)
    if settings.method == "gated-lora":
        # Recomputed layers run without a cache, and the rows behind [Fork] and [Child] have gradients: one pass.
        if not (job.recompute or settings.forks):
            packed_model = frozen_base_model_of(packed_model)
        if job.bf16:
            restore = convert_frozen(model, torch.bfloat16)
    if settings.drafts and settings.correction_rank:
        table = cast(nn.Embedding, model.get_input_embeddings()).weight
        correction = packed_model.correction = DraftCorrection(table, settings.correction_rank, known)

    def merged() -> MergedModel:
        restore()
        result = merge()
        factors = known if correction is None else correction.factors()
        return replace(
            result, correction=factors, input_rows=result.input_rows or tunable.checkpoint.mechanism(InputRows)
        )

    return packed_model, merged
