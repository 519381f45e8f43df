"""Tuning: trains a checkpoint on conversations and writes the tuned checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError

from spaceport.exporter.atomic_folder import writing
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.sar_config import save_acceptance
from spaceport.graphs.contract.draft_methods import DraftAcceptance, measured_acceptance
from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.conversation_encoder import ConversationError
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.job import (
    TrainingCallbacks,
    TuningJob,
    TuningOutcome,
    check_job,
    facts_of,
    identity_of,
    target_kind,
)
from spaceport.tools.tune.methods import Merge, adapter_settings, select_parameters
from spaceport.tools.tune.own_answers import BUNDLE_REQUESTS, distill
from spaceport.tools.tune.packed_model import PackedModel, packed_model_of
from spaceport.tools.tune.packing import PackedRow, TrainingBatches, require_forks
from spaceport.tools.tune.processes import (
    by_main_process,
    failing_together,
    lost_process,
    lost_processes_reported,
    open_accelerator,
    require_same,
)
from spaceport.tools.tune.samples import Prepared, prepare
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.state_folder import METRICS_FILE, StateFolder, reason
from spaceport.tools.tune.training import Training, TrainingMeasurement
from spaceport.tools.tune.tunable_model import TunableModel, cutoff_for, open_generator, open_tunable_model
from spaceport.tools.tune.tuned_checkpoint import write_adapter_only, write_card, write_checkpoint

_SAME_INPUTS = "start all of them with the same options, the same files and the same versions of all packages"
_SAME_STATE = (
    "TUNED.training must be the same folder or a copy of it on all machines: put TUNED on a file system that they share, copy "
    "the folder of rank 0 to the other machines, or remove it from all of them for a new training"
)


@dataclass(frozen=True)
class _OpenedJob:
    """A job whose files have been read and whose model is loaded."""

    job: TuningJob  # with the settings that the checkpoint and the model decide
    callbacks: TrainingCallbacks
    texts: dict[Path, list[Conversation]]
    identity: dict[str, list[str]]
    accelerator: Accelerator
    states: StateFolder
    tunable: TunableModel
    packed_model: PackedModel

    @property
    def settings(self) -> TrainingSettings:
        return self.job.settings


def tune(job: TuningJob, callbacks: TrainingCallbacks | None = None) -> TuningOutcome:
    """Tune a checkpoint and write the result to the target folder, which appears once it is complete."""
    callbacks = callbacks or TrainingCallbacks()
    check_job(job)
    quiet_libraries()
    torch.manual_seed(job.settings.seed)
    accelerator = open_accelerator(job.bf16, job.process_timeout)
    states = StateFolder(job.target, accelerator.is_main_process)
    with lost_processes_reported(accelerator, job.process_timeout, states.advice):
        return _tune(job, callbacks, accelerator, states)


def _tune(job: TuningJob, callbacks: TrainingCallbacks, accelerator: Accelerator, states: StateFolder) -> TuningOutcome:
    """Tune a checkpoint on this process and the others of the launch."""
    opened = _open(job, callbacks, accelerator, states)
    settings, tunable = opened.settings, opened.tunable
    prepared = _prepare(opened)
    if accelerator.num_processes > 1:
        require_same(accelerator, {"training samples": prepared.digest()}, _SAME_INPUTS)
    batches = TrainingBatches(prepared, settings, tunable.tokens.mask)
    packed_model, merge = select_parameters(opened.job, tunable, opened.packed_model, accelerator)
    if settings.method == "gated-lora":  # their logits cannot be trained
        unforked = () if prepared.forked else tunable.tokens.fork_ids
        packed_model.forbidden = (*tunable.tokens.forbidden, *unforked)
    validation = _validation_rows(opened)
    states.create(settings, opened.identity)
    training = Training(accelerator, packed_model, batches, settings)
    states.restore(training)
    callbacks.on_start(training)
    _run(opened, training, validation)
    callbacks.on_stage("writing the checkpoint")
    outcome = TuningOutcome(prepared.counts, settings, states.measurements())
    _finish(opened, training, merge, outcome, validated_acceptance(opened.job, outcome, validation))
    return outcome


def _open(job: TuningJob, callbacks: TrainingCallbacks, accelerator: Accelerator, states: StateFolder) -> _OpenedJob:
    """Read the files of a job and load its model; a training that is resumed must have the same inputs and settings."""
    require_same(accelerator, {"saved state": states.last_state()}, _SAME_STATE)
    with failing_together(accelerator):
        job = replace(job, resume=job.resume or (job.auto_resume and states.has_progress()))
        states.check_resume(job.resume)
        checkpoint = open_checkpoint(job.checkpoint, TokenFlags(), job.remote_code, job.adapter)
        job = replace(job, settings=adapter_settings(job.settings, checkpoint))
        callbacks.on_stage("reading the data")
        texts = {path: read_conversations(path) for path in (*job.data, *job.validation)}
        identity = identity_of(job)
        if job.resume:
            states.check_identity(identity)
    require_same(accelerator, facts_of(job, identity), _SAME_INPUTS)
    callbacks.on_stage("loading the checkpoint")
    with failing_together(accelerator):
        tunable = open_tunable_model(checkpoint, job.settings, job.names)
        callbacks.on_stage("verifying the model on packed rows")
        packed_model = packed_model_of(tunable.model, job.settings.slots)
        cutoff = cutoff_for(job.settings, packed_model.positions)
        job = replace(job, settings=replace(job.settings, cutoff=cutoff))
        if job.resume:
            states.check_settings(job.settings)
    return _OpenedJob(job, callbacks, texts, identity, accelerator, states, tunable, packed_model)


def _prepare(opened: _OpenedJob) -> Prepared:
    """The samples of the data, with the model's own answers if the job asks for them."""
    job, settings, callbacks = opened.job, opened.settings, opened.callbacks
    counts: Counter[str] = Counter()
    texts = dict(opened.texts)
    if job.self_distill:
        opened.states.create(settings, opened.identity)
        callbacks.on_stage("generating the model's own answers")
        texts.update(_distilled(opened, counts))
    callbacks.on_stage("preparing the samples")
    prepared = gather(job.data, texts, opened.tunable, settings)
    prepared.counts.update(counts)
    callbacks.on_samples(prepared.counts)
    require_forks(settings, prepared)
    return prepared


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


def _distilled(opened: _OpenedJob, counts: Counter[str]) -> dict[Path, list[Conversation]]:
    """The conversations with the model's own answers; the main process generates them for all."""
    job, cutoff = opened.job, opened.settings.cutoff
    requests = 1 if job.bundle is None else BUNDLE_REQUESTS

    def generate(on_answer: Callable[[], None]) -> tuple[dict[Path, list[Conversation]], Counter[str]]:
        answered, counted = {}, Counter[str]()
        with open_generator(job.checkpoint, job.bundle, cutoff, job.remote_code) as runtime:
            for number, file in enumerate(job.data):
                answers = opened.states.folder / f"answers-{number}.jsonl"
                answered[file] = distill(opened.texts[file], runtime, answers, cutoff, counted, requests, on_answer)
        return answered, counted

    answered, counted = by_main_process(opened.accelerator, generate, job.process_timeout)
    counts.update(counted)
    return answered


def _validation_rows(opened: _OpenedJob) -> list[PackedRow]:
    """Rows of the validation data."""
    if not opened.job.validation:
        return []
    plain = replace(opened.settings, epochs=1.0, max_steps=None, unforked_share=None, unfork_rate=0.0)
    prepared = gather(opened.job.validation, opened.texts, opened.tunable, plain)
    if not (prepared.forked or prepared.whole):
        raise InputFault("no validation samples: every sample was dropped; expected at least one usable conversation")
    batches = TrainingBatches(prepared, plain, opened.tunable.tokens.mask)
    return [row for step in range(batches.steps) for row in batches.rows(step)]


def _run(opened: _OpenedJob, training: Training, validation: Sequence[PackedRow]) -> None:
    """Run the remaining steps."""
    job, callbacks = opened.job, opened.callbacks

    def log(measured: TrainingMeasurement, kind: str) -> None:
        opened.states.log(measured, kind)
        callbacks.on_measurement(measured, kind)

    last = training.finished()
    while not last:
        training.run_step()
        last = training.finished()
        if last or training.step % job.log_every == 0:
            log(training.measure(), "training")
        callbacks.on_step(training)
        due = last or training.step % job.save_every == 0
        stop = not last and training.agree(callbacks.should_stop())
        if due and validation:
            log(training.evaluate(validation), "validation")
        if due or stop:
            opened.states.save(training)
        if stop:
            raise KeyboardInterrupt


def validated_acceptance(
    job: TuningJob, outcome: TuningOutcome, validation: Sequence[PackedRow]
) -> DraftAcceptance | None:
    """The acceptance rates of the last validation; None without validation data or without mask slots."""
    groups = sum(int((row.mask_slots == 1).sum()) for row in validation)
    shares = (outcome.last("validation") or {}).get("acceptance")
    if shares is None or not groups:
        return None
    names = ", ".join(path.name for path in job.validation)
    return measured_acceptance(shares, groups, f"validation data {names}", date.today())


@contextmanager
def _write_errors(job: TuningJob) -> Iterator[None]:
    """Turn a failed write into an error that says how to continue."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if lost_process(error):
            raise
        raise InputFault(
            f"{job.target}: cannot be written ({reason(error)}): the training state is saved; free disk space and continue "
            "with --resume"
        ) from error


@contextmanager
def _complete(accelerator: Accelerator) -> Iterator[None]:
    """Go on in the main process, which has written the checkpoint, if another process is lost."""
    try:
        yield
    except RuntimeError as error:
        if not (accelerator.is_main_process and lost_process(error)):
            raise


def _finish(
    opened: _OpenedJob, training: Training, merge: Merge, outcome: TuningOutcome, acceptance: DraftAcceptance | None
) -> None:
    """Write the tuned checkpoint and its model card."""
    job, accelerator, states = opened.job, opened.accelerator, opened.states
    state: dict[str, Any] | None = None
    if accelerator.distributed_type == DistributedType.FSDP:
        gathered = accelerator.get_state_dict(training.packed_model)
        state = {name.removeprefix("model."): tensor for name, tensor in gathered.items() if name.startswith("model.")}
    accelerator.wait_for_everyone()
    with (
        _write_errors(job),
        writing(job.target, job.overwrite, target_kind(job))
        if accelerator.is_main_process
        else nullcontext() as partial,
    ):
        if partial is not None:
            if job.adapter_only:
                write_adapter_only(partial, opened.tunable, merge())
            elif (dtype := write_checkpoint(partial, opened.tunable, merge(), state)) != opened.tunable.dtype:
                opened.callbacks.on_stage(
                    f"some weights exceed the range of {opened.tunable.dtype}: written as {dtype}"
                )
            if acceptance is not None:
                save_acceptance(partial, acceptance)
            write_card(partial, job, training.batches, outcome)
            (partial / METRICS_FILE).write_text((states.folder / METRICS_FILE).read_text("utf-8"), "utf-8")
    if accelerator.is_main_process:
        states.remove()
    with _complete(accelerator):
        accelerator.wait_for_everyone()
    states.remove()  # what processes on other file systems have
