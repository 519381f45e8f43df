"""Trained model: the model that a training runs, with the parameters of its method selected."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.correction import DraftCorrection, Factors
from spaceport.graphs.gated import MaskAdapter, checkpoint_layers
from spaceport.tools.tune.frozen_base import frozen_base_model_of
from spaceport.tools.tune.frozen_dtype import convert_frozen
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.methods import Merge, MergedModel, apply_method
from spaceport.tools.tune.packed_model import PackedModel
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tunable_model import TunableModel


def adapter_settings(settings: TrainingSettings, checkpoint: Checkpoint) -> TrainingSettings:
    """The settings with those of the mask slots, the adapter and the draft correction of a checkpoint."""
    adapter, correction = checkpoint.mechanism(MaskAdapter), checkpoint.mechanism(Factors)
    layout = checkpoint.drafts.layout
    shift, group = settings.shift, settings.group
    settings = replace(settings, shift=layout.shift if shift is None else shift, group=group or layout.group)
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
    trained, merge = _with_method(job, tunable, packed_model, accelerator)
    rank = job.settings.correction_rank if job.settings.drafts else 0

    def merged() -> MergedModel:
        found = merge()
        return replace(found, correction=tunable.correction, input_rows=found.input_rows or tunable.input_rows)

    if not rank:
        return trained, merged
    table = cast(nn.Embedding, tunable.model.get_input_embeddings()).weight
    correction = trained.correction = DraftCorrection(table, rank, tunable.correction)
    return trained, lambda: replace(merged(), correction=correction.factors())


def _with_method(
    job: TuningJob, tunable: TunableModel, packed_model: PackedModel, accelerator: Accelerator
) -> tuple[PackedModel, Merge]:
    """The model that trains the method's parameters, and the function that merges them at the end."""
    sharded = accelerator.distributed_type not in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    if sharded and job.settings.method != "full":
        raise OptionFault(
            f"--method {job.settings.method} under {accelerator.distributed_type.value}: sharded weights support only "
            "--method full; expected that, or processes that each hold the whole model"
        )
    merge = apply_method(tunable.model, job.settings, tunable.tokens, tunable.adapter)
    if job.recompute:
        checkpoint_layers(tunable.model)
    if job.settings.method != "gated-lora":
        return packed_model, merge
    # Recomputed layers run without a cache, and the rows behind [Fork] and [Child] have gradients: one pass.
    if not (job.recompute or job.settings.forks):
        packed_model = frozen_base_model_of(packed_model)
    if not job.bf16:
        return packed_model, merge
    restore = convert_frozen(tunable.model, torch.bfloat16)

    def restore_and_merge() -> MergedModel:
        restore()
        return merge()

    return packed_model, restore_and_merge
