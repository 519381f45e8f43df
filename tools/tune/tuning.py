"""Tuning: the whole way from a checkpoint and conversations to a checkpoint that drafts and forks."""

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

from spaceport.exporter.atomic_folder import check_target, writing
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.graphs.gated import checkpoint_layers
from spaceport.tools.tune.card import CardFacts, write_card
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.course import Course, hold_to_objective
from spaceport.tools.tune.distill import Distillation, distill, writer
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob, TuningOutcome
from spaceport.tools.tune.keeping import METRICS_FILE, Keeping, reason
from spaceport.tools.tune.methods import Merge, apply_method
from spaceport.tools.tune.packing import PackedRow
from spaceport.tools.tune.samples import Prepared, prepare
from spaceport.tools.tune.saving import CHECKPOINT, write_checkpoint
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.spelling import SpellingError
from spaceport.tools.tune.subject import DECIDING, Subject, cutoff_for, open_subject
from spaceport.tools.tune.trainee import trainee_of
from spaceport.tools.tune.training import Training, TrainingMeasurement


def tune(job: TuningJob, callbacks: TrainingCallbacks | None = None) -> TuningOutcome:
    """Tune a checkpoint and write it to the target, which appears when it is whole."""
    callbacks = callbacks or TrainingCallbacks()
    _check(job)
    quiet_libraries()
    torch.manual_seed(job.settings.seed)
    kept = Keeping(job.target, False)  # it only looks: which process writes is known when they have met
    kept.expect(job.resume)
    checkpoint = open_checkpoint(job.checkpoint, TokenFlags(), job.remote_code)
    callbacks.stage("reading the data")
    texts = {path: read_conversations(path) for path in (*job.data, *job.validation)}
    identity = _identity(job)
    if job.resume:
        kept.hold_to(identity)
    AcceleratorState._reset_state()  # it keeps the precision of a process' first training
    accelerator = Accelerator(mixed_precision="bf16" if job.bf16 else "no")
    keeping = Keeping(job.target, accelerator.is_main_process)
    callbacks.stage("loading the checkpoint")
    subject = open_subject(checkpoint, job.settings, job.names)
    callbacks.stage("proving that it can be trained over packed rows")
    trainee = trainee_of(subject.model, job.settings.slots)
    settings = replace(job.settings, cutoff=cutoff_for(job.settings, trainee.positions))
    if job.resume:
        keeping.hold_to_settings(settings)
    accelerator.wait_for_everyone()  # before one process makes what the others would take for an earlier training
    counts: Counter[str] = Counter()
    if job.distillation is not None:
        keeping.begin(settings, identity)
        callbacks.stage("writing the model's own answers")
        texts.update(_distilled(job, job.distillation, texts, keeping, settings.cutoff, accelerator, counts))
    callbacks.stage("preparing the samples")
    prepared = gather(job.data, texts, subject, settings)
    prepared.counts.update(counts)
    callbacks.prepared(prepared.counts)
    hold_to_objective(settings, prepared)
    course = Course(prepared, settings, subject.tokens.mask)
    merge = _learning(job, subject, accelerator)
    checked = _validation(job, texts, subject, settings)
    keeping.begin(settings, identity)
    training = Training(accelerator, trainee, course, settings)
    keeping.restore(training)
    callbacks.begun(training)
    _run(job, callbacks, training, keeping, checked)
    callbacks.stage("writing the checkpoint")
    outcome = TuningOutcome(prepared.counts, settings, keeping.measurements())
    _finish(job, callbacks, subject, training, merge, keeping, outcome)
    return outcome


def gather(
    files: Sequence[Path], texts: dict[Path, list[Conversation]], subject: Subject, settings: TrainingSettings
) -> Prepared:
    """The samples of some files, with all counts together."""
    whole = Prepared()
    for file in files:
        try:
            found = prepare(texts[file], subject.spelling, settings.cutoff, settings.whole_rate > 0)
        except SpellingError as error:
            raise InputFault(f"{file} {error}") from error
        whole.forked += found.forked
        whole.unforked += found.unforked
        whole.whole += found.whole
        whole.counts.update(found.counts)
    return whole


def _distilled(
    job: TuningJob,
    distillation: Distillation,
    texts: dict[Path, list[Conversation]],
    keeping: Keeping,
    cutoff: int,
    accelerator: Accelerator,
    counts: Counter[str],
) -> dict[Path, list[Conversation]]:
    """The conversations of the data with the model's own answers; the first process writes them for all."""
    found = {}
    with accelerator.main_process_first(), writer(job.checkpoint, distillation, cutoff, job.remote_code) as runtime:
        for number, file in enumerate(job.data):
            answers = keeping.folder / f"answers-{number}.jsonl"
            found[file] = distill(texts[file], runtime, answers, cutoff, counts)
    return found


def _check(job: TuningJob) -> None:
    """Raise for what can be told wrong before anything is loaded."""
    check_target(job.target, job.overwrite, CHECKPOINT)
    if job.target.resolve() == job.checkpoint.resolve():
        raise OptionFault(f"{job.target}: is the checkpoint that is tuned: choose another folder, it would be lost")
    for path in (job.checkpoint, *job.data, *job.validation):
        if job.target.resolve() in path.resolve().parents:
            raise OptionFault(f"{job.target}: holds {path}, which is read: choose another folder, it would be lost")
    for name, value in (("save-every", job.save_every), ("log-every", job.log_every)):
        if value < 1:
            raise OptionFault(f"--{name} is {value}: expected at least 1")
    if not job.data:
        raise OptionFault("no data: expected at least one JSONL file")


def _learning(job: TuningJob, subject: Subject, accelerator: Accelerator) -> Merge:
    """Let the weights learn that the method says."""
    sharded = accelerator.distributed_type not in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    if sharded and job.settings.method != "full":
        raise OptionFault(
            f"--method {job.settings.method} under {accelerator.distributed_type.value}: the weights are in parts there; "
            "expected --method full, or processes that each hold the whole model"
        )
    merge = apply_method(subject.model, job.settings, subject.new_ids, subject.tokens.mask)
    if job.recompute:
        checkpoint_layers(subject.model)
    return merge


def _identity(job: TuningJob) -> dict[str, list[str]]:
    """What beside the settings tells a training from others."""
    own = map(job.checkpoint.joinpath, DECIDING)
    return {
        "data": [f"{path.name} {_digest(path)}" for path in job.data],
        "validation": [f"{path.name} {_digest(path)}" for path in job.validation],
        "checkpoint": [f"{path.name} {_digest(path)}" for path in own if path.exists()],
        "tokens": list(job.names.all),
        "self-distill": [str(job.distillation is not None)],
        "bf16": [str(job.bf16)],
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return record_of(file).sha256


def _validation(
    job: TuningJob, texts: dict[Path, list[Conversation]], subject: Subject, settings: TrainingSettings
) -> list[PackedRow]:
    """The rows that are looked at and not learned."""
    if not job.validation:
        return []
    plain = replace(settings, epochs=1.0, max_steps=None, unforked_share=None, whole_rate=0.0)
    prepared = gather(job.validation, texts, subject, plain)
    if not (prepared.forked or prepared.whole):
        raise InputFault("no validation: every sample was dropped; expected at least one conversation that can be used")
    course = Course(prepared, plain, subject.tokens.mask)
    return [row for step in range(course.steps) for row in course.rows(step)]


def _run(
    job: TuningJob, callbacks: TrainingCallbacks, training: Training, keeping: Keeping, checked: Sequence[PackedRow]
) -> None:
    """The steps that are left."""

    def note(measured: TrainingMeasurement, kind: str) -> None:
        keeping.note(measured, kind)
        callbacks.measured(measured, kind)

    while training.step < training.course.steps:
        training.learn()
        last = training.step == training.course.steps
        if last or training.step % job.log_every == 0:
            note(training.measure(), "training")
        callbacks.stepped(training)
        due = last or training.step % job.save_every == 0
        stop = not last and training.agree(callbacks.stop())
        if due and checked:
            note(training.evaluate(checked), "validation")
        if due or stop:
            keeping.save(training)
        if stop:
            raise KeyboardInterrupt


@contextmanager
def _told(job: TuningJob) -> Iterator[None]:
    """Say that nothing is lost if the checkpoint cannot be written."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputFault(
            f"{job.target}: cannot be written ({reason(error)}): the training is kept; make room on the disk and go on with "
            "--resume"
        ) from error


def _finish(
    job: TuningJob,
    callbacks: TrainingCallbacks,
    subject: Subject,
    training: Training,
    merge: Merge,
    keeping: Keeping,
    outcome: TuningOutcome,
) -> None:
    """Put the tuned checkpoint in its place, with its card."""
    accelerator = training.accelerator
    state: dict[str, Any] | None = None
    if accelerator.distributed_type == DistributedType.FSDP:
        whole = accelerator.get_state_dict(training.trainee)
        state = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    accelerator.wait_for_everyone()
    with (
        _told(job),
        writing(job.target, job.overwrite, CHECKPOINT) if accelerator.is_main_process else nullcontext() as partial,
    ):
        if partial is not None:
            dtype = write_checkpoint(partial, subject, merge(), state)
            if dtype != subject.dtype:
                callbacks.stage(f"some weights are too large for {subject.dtype}: written as {dtype}")
            facts = CardFacts(
                job.checkpoint, job.data, training.course, outcome.counts, outcome.settings, outcome.measurements
            )
            write_card(partial, facts)
            (partial / METRICS_FILE).write_text((keeping.folder / METRICS_FILE).read_text("utf-8"), "utf-8")
    accelerator.wait_for_everyone()
    keeping.clear()
