"""Tuning: trains a checkpoint on conversations and writes the tuned checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors import SafetensorError

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.adapter_folder import ADAPTER_FOLDER
from spaceport.exporter.atomic_folder import FolderKind, check_target, writing
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.graphs.gated import Adapter, checkpoint_layers
from spaceport.tools.tune.batches import TrainingBatches, require_forks
from spaceport.tools.tune.card import CardFacts, write_card
from spaceport.tools.tune.conversation_encoder import ConversationError
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.distill import Distillation, distill, open_generator
from spaceport.tools.tune.frozen_base import frozen_base_model_of
from spaceport.tools.tune.frozen_dtype import convert_frozen
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob, TuningOutcome
from spaceport.tools.tune.methods import Merge, MergedModel, apply_method
from spaceport.tools.tune.packed_model import PackedModel, packed_model_of
from spaceport.tools.tune.packing import PackedRow
from spaceport.tools.tune.samples import Prepared, prepare
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.state_folder import METRICS_FILE, StateFolder, reason
from spaceport.tools.tune.training import Training, TrainingMeasurement
from spaceport.tools.tune.tunable_model import IDENTITY_FILES, TunableModel, cutoff_for, open_tunable_model
from spaceport.tools.tune.tuned_checkpoint import CHECKPOINT, write_adapter_only, write_checkpoint


def tune(job: TuningJob, callbacks: TrainingCallbacks | None = None) -> TuningOutcome:
    """Tune a checkpoint and write the result to the target folder, which appears once it is complete."""
    callbacks = callbacks or TrainingCallbacks()
    _check(job)
    quiet_libraries()
    torch.manual_seed(job.settings.seed)
    existing = StateFolder(job.target, False)  # read only: the main process is known once accelerate has started
    existing.check_resume(job.resume)
    checkpoint = open_checkpoint(job.checkpoint, TokenFlags(), job.remote_code, job.adapter)
    job = replace(job, settings=_adapter_settings(job.settings, checkpoint.adapter))
    callbacks.on_stage("reading the data")
    texts = {path: read_conversations(path) for path in (*job.data, *job.validation)}
    identity = _identity(job)
    if job.resume:
        existing.check_identity(identity)
    AcceleratorState._reset_state()  # it would keep the precision of the process' first training
    accelerator = Accelerator(mixed_precision="bf16" if job.bf16 else "no")
    states = StateFolder(job.target, accelerator.is_main_process)
    callbacks.on_stage("loading the checkpoint")
    tunable = open_tunable_model(checkpoint, job.settings, job.names)
    callbacks.on_stage("verifying the model on packed rows")
    packed_model = packed_model_of(tunable.model, job.settings.slots)
    settings = replace(job.settings, cutoff=cutoff_for(job.settings, packed_model.positions))
    if job.resume:
        states.check_settings(settings)
    accelerator.wait_for_everyone()  # before the main process creates files that the others would take for an earlier training
    counts: Counter[str] = Counter()
    if job.distillation is not None:
        states.create(settings, identity)
        callbacks.on_stage("generating the model's own answers")
        texts.update(_distilled(job, job.distillation, texts, states, settings.cutoff, accelerator, counts))
    callbacks.on_stage("preparing the samples")
    prepared = gather(job.data, texts, tunable, settings)
    prepared.counts.update(counts)
    callbacks.on_samples(prepared.counts)
    require_forks(settings, prepared)
    batches = TrainingBatches(prepared, settings, tunable.tokens.mask)
    packed_model, merge = _select_parameters(job, tunable, packed_model, accelerator)
    validation = _validation_rows(job, texts, tunable, settings)
    states.create(settings, identity)
    training = Training(accelerator, packed_model, batches, settings)
    states.restore(training)
    callbacks.on_start(training)
    _run(job, callbacks, training, states, validation)
    callbacks.on_stage("writing the checkpoint")
    outcome = TuningOutcome(prepared.counts, settings, states.measurements())
    _finish(job, callbacks, tunable, training, merge, states, outcome)
    return outcome


def gather(
    files: Sequence[Path], texts: dict[Path, list[Conversation]], tunable: TunableModel, settings: TrainingSettings
) -> Prepared:
    """Samples of all files, with their summed counts."""
    merged = Prepared()
    for file in files:
        try:
            found = prepare(texts[file], tunable.encoder, settings.cutoff, settings.unfork_rate > 0)
        except ConversationError as error:
            raise InputFault(f"{file} {error}") from error
        merged.forked += found.forked
        merged.unforked += found.unforked
        merged.whole += found.whole
        merged.counts.update(found.counts)
    return merged


def _distilled(
    job: TuningJob,
    distillation: Distillation,
    texts: dict[Path, list[Conversation]],
    states: StateFolder,
    cutoff: int,
    accelerator: Accelerator,
    counts: Counter[str],
) -> dict[Path, list[Conversation]]:
    """The conversations with the model's own answers; the main process generates them for all."""
    found = {}
    with (
        accelerator.main_process_first(),
        open_generator(job.checkpoint, distillation, cutoff, job.remote_code) as runtime,
    ):
        for number, file in enumerate(job.data):
            answers = states.folder / f"answers-{number}.jsonl"
            found[file] = distill(texts[file], runtime, answers, cutoff, counts, distillation.requests)
    return found


def _kind(job: TuningJob) -> FolderKind:
    return ADAPTER_FOLDER if job.adapter_only else CHECKPOINT


def _check(job: TuningJob) -> None:
    """Raise for invalid options before anything is loaded."""
    check_target(job.target, job.overwrite, _kind(job))
    if job.adapter is not None and job.settings.method != "gated-lora":
        raise OptionFault(f"--adapter with --method {job.settings.method}: expected --method gated-lora")
    if job.adapter_only and job.settings.method != "gated-lora":
        raise OptionFault(f"--adapter-only with --method {job.settings.method}: expected --method gated-lora")
    if job.target.resolve() == job.checkpoint.resolve():
        raise OptionFault(f"{job.target}: is the checkpoint to tune and would be overwritten: choose another folder")
    for path in (job.checkpoint, *job.data, *job.validation):
        if job.target.resolve() in path.resolve().parents:
            raise OptionFault(
                f"{job.target}: contains the input {path}, which would be overwritten: choose another folder"
            )
    for name, value in (("save-every", job.save_every), ("log-every", job.log_every)):
        if value < 1:
            raise OptionFault(f"--{name} is {value}: expected at least 1")
    if not job.data:
        raise OptionFault("no data: expected at least one JSONL file")


def _adapter_settings(settings: TrainingSettings, adapter: Adapter | None) -> TrainingSettings:
    """The settings with those of an adapter that is trained further."""
    if adapter is None:
        return settings
    return replace(settings, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)


def _select_parameters(
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


def _identity(job: TuningJob) -> dict[str, list[str]]:
    """Inputs that, besides the settings, identify a training."""
    own = [job.checkpoint] if job.checkpoint.is_file() else map(job.checkpoint.joinpath, IDENTITY_FILES)
    return {
        "data": [f"{path.name} {_digest(path)}" for path in job.data],
        "validation": [f"{path.name} {_digest(path)}" for path in job.validation],
        "checkpoint": [f"{path.name} {_digest(path)}" for path in own if path.exists()],
        **({} if job.adapter is None else {"adapter": [_digest(job.adapter / ADAPTER_FILE)]}),
        "tokens": list(job.names.all),
        "self-distill": [str(job.distillation is not None)],
        "bf16": [str(job.bf16)],
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return record_of(file).sha256


def _validation_rows(
    job: TuningJob, texts: dict[Path, list[Conversation]], tunable: TunableModel, settings: TrainingSettings
) -> list[PackedRow]:
    """Rows of the validation data."""
    if not job.validation:
        return []
    plain = replace(settings, epochs=1.0, max_steps=None, unforked_share=None, unfork_rate=0.0)
    prepared = gather(job.validation, texts, tunable, plain)
    if not (prepared.forked or prepared.whole):
        raise InputFault("no validation samples: every sample was dropped; expected at least one usable conversation")
    batches = TrainingBatches(prepared, plain, tunable.tokens.mask)
    return [row for step in range(batches.steps) for row in batches.rows(step)]


def _run(
    job: TuningJob,
    callbacks: TrainingCallbacks,
    training: Training,
    states: StateFolder,
    validation: Sequence[PackedRow],
) -> None:
    """Run the remaining steps."""

    def log(measured: TrainingMeasurement, kind: str) -> None:
        states.log(measured, kind)
        callbacks.on_measurement(measured, kind)

    last = training.agree(training.finished)
    while not last:
        training.run_step()
        last = training.agree(training.finished)
        if last or training.step % job.log_every == 0:
            log(training.measure(), "training")
        callbacks.on_step(training)
        due = last or training.step % job.save_every == 0
        stop = not last and training.agree(callbacks.should_stop())
        if due and validation:
            log(training.evaluate(validation), "validation")
        if due or stop:
            states.save(training)
        if stop:
            raise KeyboardInterrupt


@contextmanager
def _write_errors(job: TuningJob) -> Iterator[None]:
    """Turn a failed write into an error that says how to continue."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputFault(
            f"{job.target}: cannot be written ({reason(error)}): the training state is saved; free disk space and continue "
            "with --resume"
        ) from error


def _finish(
    job: TuningJob,
    callbacks: TrainingCallbacks,
    tunable: TunableModel,
    training: Training,
    merge: Merge,
    states: StateFolder,
    outcome: TuningOutcome,
) -> None:
    """Write the tuned checkpoint and its model card."""
    accelerator = training.accelerator
    state: dict[str, Any] | None = None
    if accelerator.distributed_type == DistributedType.FSDP:
        gathered = accelerator.get_state_dict(training.packed_model)
        state = {name.removeprefix("model."): tensor for name, tensor in gathered.items()}
    accelerator.wait_for_everyone()
    with (
        _write_errors(job),
        writing(job.target, job.overwrite, _kind(job)) if accelerator.is_main_process else nullcontext() as partial,
    ):
        if partial is not None:
            if job.adapter_only:
                write_adapter_only(partial, tunable, merge())
            elif (dtype := write_checkpoint(partial, tunable, merge(), state)) != tunable.dtype:
                callbacks.on_stage(f"some weights exceed the range of {tunable.dtype}: written as {dtype}")
            facts = CardFacts(job, training.batches, outcome)
            write_card(partial, facts)
            (partial / METRICS_FILE).write_text((states.folder / METRICS_FILE).read_text("utf-8"), "utf-8")
    accelerator.wait_for_everyone()
    states.remove()
