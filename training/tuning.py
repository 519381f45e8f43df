"""Tuning: trains a checkpoint on conversations and writes the tuned checkpoint."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from spaceport.exporter.atomic_folder import writing
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import save_acceptance
from spaceport.exporter.interrupts import interrupts_handled
from spaceport.graphs.contract.draft_methods import DraftAcceptance, measured_acceptance
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.mechanism import Phrases
from spaceport.training.conversations import Conversation, read_conversations
from spaceport.training.methods import Merge, adapter_settings, select_parameters
from spaceport.training.packed_model import PackedModel, packed_model_of
from spaceport.training.packing import PackedRow, TrainingBatches, require_forks
from spaceport.training.phrases import phrases_of
from spaceport.training.samples import prepare_files
from spaceport.training.settings import (
    DEFAULT,
    TokenNames,
    TrainingSettings,
    TuningJob,
    TuningOutcome,
    check_job,
    facts_of,
)
from spaceport.training.training import METRICS_FILE, Training, TrainingMeasurement, TrainingStates, write_errors
from spaceport.training.tunable_model import TunableModel, cutoff_for, open_tunable_model
from spaceport.training.tuned_checkpoint import write_adapter_only, write_card, write_checkpoint

_Texts = dict[Path, list[Conversation]]  # by data file
_USUAL = TrainingSettings()
_SECONDS = 10.0  # between two measurements that are shown


def is_first() -> bool:
    """Whether this is the first of the processes that accelerate or torchrun started: only it prints."""
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """Lines on stderr with the time since the start, in the first of several processes only."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._shown = float("-inf")  # time of the last measurement

    def say(self, text: str) -> None:
        if is_first():
            print(f"{time.perf_counter() - self._started:6.1f} s  {text}", file=sys.stderr, flush=True)

    def show(self, measured: TrainingMeasurement, kind: str) -> None:
        """Show a measurement; those of training steps at most once in ten seconds, and the last one."""
        now = time.perf_counter()
        if kind == "validation" or measured.step == measured.steps or now - self._shown >= _SECONDS:
            self._shown = now
            self.say(f"step {measured.step}/{measured.steps}  {described(measured, kind)}")


def described(measured: TrainingMeasurement, kind: str) -> str:
    """A measurement in one line."""
    parts = ["validation"] if kind == "validation" else []
    if measured.losses[0] is not None:  # a frozen base's next-token loss is not measured while it trains
        parts.append(f"loss {measured.losses[0]:.3f}  accuracy {_percent(measured.accuracies[0])}")
    if measured.accuracies[1:]:
        parts.append(f"mask slots {' '.join(map(_percent, measured.accuracies[1:]))}")
    if measured.corrected:
        parts.append(f"corrected {' '.join(map(_percent, measured.corrected))}")
    if kind == "validation" and measured.acceptance:
        parts.append(f"tokens per step {1 + sum(filter(None, measured.acceptance)):.2f}")
    if kind == "training":
        parts.append(f"{measured.tokens_per_second:,.0f} rows/s")
        if measured.seconds_left is not None:
            left = timedelta(seconds=round(measured.seconds_left))
            parts.append(f"{left} left, ends {datetime.now().astimezone() + left:%H:%M}")
    return "  ".join(parts)


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Whether an interrupt came: the first one only asks the block to end, the second one ends it at once."""
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        say("interrupted: finishing this step and saving the state for --resume; interrupt again to stop at once")

    with interrupts_handled(handle):
        yield lambda: bool(received)


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.0%}"


def tune(
    checkpoint: Path | str,
    target: Path | str,
    data: Sequence[Path | str],
    *,
    validation: Sequence[Path | str] = (),
    adapter: Path | str | None = None,
    adapter_only: bool = False,
    bf16: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    settings: TrainingSettings = _USUAL,
    names: TokenNames = DEFAULT,
) -> TuningOutcome:
    """Train a checkpoint, a Hugging Face folder or GGUF file, to draft for itself, and write it to a new folder.

    - `data`, `validation`: JSONL files of conversations.
    - `adapter`: An adapter folder to train further.
    - `adapter_only`: Whether to write the adapter of method "gated-lora" without the base weights.
    - `bf16`: Whether to compute in bfloat16; trained weights stay float32.
    - `resume`: Whether to continue from the state that an interrupted training left.
    - `overwrite`: Whether to replace a folder that is there.
    - `settings`: The objective, the method and all numbers of the training.
    - `names`: Texts of the special tokens.
    """
    return train(
        TuningJob(
            Path(checkpoint),
            Path(target),
            tuple(map(Path, data)),
            settings,
            names,
            tuple(map(Path, validation)),
            bf16=bf16,
            resume=resume,
            overwrite=overwrite,
            adapter=None if adapter is None else Path(adapter),
            adapter_only=adapter_only,
        )
    )


def train(job: TuningJob) -> TuningOutcome:
    """Tune a checkpoint and write the result to the target folder, which appears once it is complete.

    Several processes, as torchrun or `accelerate launch` start them, train together. Progress goes to stderr.
    """
    check_job(job)
    quiet_libraries()
    torch.manual_seed(job.settings.seed)
    progress, accelerator = Progress(), open_accelerator(job.bf16)
    states = TrainingStates(job.target, accelerator, job.resume)
    job, tunable, packed_model, texts = _open(job, progress)
    settings = job.settings
    prepared = prepare_files(
        {file: texts[file] for file in job.data}, tunable.encoder, settings.cutoff, settings.unfork_rate > 0
    )
    progress.say("samples: " + ", ".join(f"{count} {name}" for name, count in prepared.counts.items() if count))
    require_forks(settings, prepared)
    batches = TrainingBatches(prepared, settings, tunable.tokens.mask)
    phrases = phrases_of(prepared, settings.phrases) if settings.drafts else tunable.checkpoint.mechanism(Phrases)
    packed_model, merge = select_parameters(job, tunable, packed_model, accelerator)
    if settings.method == "gated-lora":  # their logits cannot be trained
        unforked = () if prepared.forked else tunable.tokens.fork_ids
        packed_model.forbidden = (*tunable.tokens.forbidden, *unforked)
    validation = _validation_rows(job, texts, tunable)
    states.begin(facts_of(job))
    training = Training(accelerator, packed_model, batches, settings)
    states.restore(training)
    progress.say(training.extent)
    _run(job, training, states, validation, progress)
    progress.say("writing the checkpoint")
    outcome = TuningOutcome(prepared.counts, settings, states.measurements())
    with write_errors(str(job.target)):
        _write(
            job,
            training,
            tunable,
            lambda: replace(merge(), phrases=phrases),
            outcome,
            validated_acceptance(job, outcome, validation),
        )
    accelerator.wait_for_everyone()
    states.remove()
    if outcome.warning is not None:
        progress.say(outcome.warning)
    return outcome


def _open(job: TuningJob, progress: Progress) -> tuple[TuningJob, TunableModel, PackedModel, _Texts]:
    """The job with the settings that its checkpoint decides, its model, and the conversations of its files."""
    checkpoint = open_checkpoint(job.checkpoint, TokenFlags(), job.remote_code, job.adapter)
    settings = adapter_settings(job.settings, checkpoint)
    progress.say("reading the data")
    texts = {path: read_conversations(path) for path in (*job.data, *job.validation)}
    progress.say("loading the checkpoint")
    tunable = open_tunable_model(checkpoint, settings, job.names)
    progress.say("verifying the model on packed rows")
    packed_model = packed_model_of(tunable.model, settings.slots)
    settings = replace(settings, cutoff=cutoff_for(settings, packed_model.positions))
    progress.say("preparing the samples")
    return replace(job, settings=settings), tunable, packed_model, texts


def open_accelerator(bf16: bool) -> Accelerator:
    """The accelerator of this process, connected with the other processes of the launch."""
    AcceleratorState._reset_state()  # it would keep the precision of the process' first training
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    cpu = launched > 1 and not torch.accelerator.is_available()  # else accelerate opens one training in each process
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=cpu)
    if accelerator.num_processes < launched:
        raise OptionFault(
            f"{launched} processes were started, and accelerate connected {accelerator.num_processes}: expected a launch by "
            "torchrun, which starts them on CPUs and GPUs"
        )
    return accelerator


def _validation_rows(job: TuningJob, texts: _Texts, tunable: TunableModel) -> list[PackedRow]:
    """Rows of the validation data."""
    if not job.validation:
        return []
    plain = replace(job.settings, epochs=1.0, max_steps=None, unfork_rate=0.0)
    prepared = prepare_files({file: texts[file] for file in job.validation}, tunable.encoder, plain.cutoff)
    if not (prepared.forked or prepared.whole):
        raise InputFault("no validation samples: every sample was dropped; expected at least one usable conversation")
    batches = TrainingBatches(prepared, plain, tunable.tokens.mask)
    return [row for step in range(batches.steps) for row in batches.rows(step)]


def _run(
    job: TuningJob,
    training: Training,
    states: TrainingStates,
    validation: Sequence[PackedRow],
    progress: Progress,
) -> None:
    """Run the remaining steps; after an interrupt, save the state and raise KeyboardInterrupt."""

    def log(measured: TrainingMeasurement, kind: str) -> None:
        states.log(measured, kind)
        progress.show(measured, kind)

    last = training.finished()
    with stopping(progress.say) as interrupted:
        while not last:
            training.run_step()
            last = training.finished()
            if last or training.step % job.log_every == 0:
                log(training.measure(), "training")
            due = last or training.step % job.save_every == 0
            stop = not last and training.agree(interrupted())
            if due and validation:
                log(training.evaluate(validation), "validation")
            if due or stop:
                states.save(training)
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


def _write(
    job: TuningJob,
    training: Training,
    tunable: TunableModel,
    merge: Merge,
    outcome: TuningOutcome,
    acceptance: DraftAcceptance | None,
) -> None:
    """Write the tuned checkpoint, its measurements and its model card, in the main process."""
    accelerator = training.accelerator
    weights: dict[str, Any] | None = None
    if accelerator.distributed_type == DistributedType.FSDP:
        gathered = accelerator.get_state_dict(training.packed_model)
        weights = {
            name.removeprefix("model."): tensor for name, tensor in gathered.items() if name.startswith("model.")
        }
    if not accelerator.is_main_process:
        return
    with writing(job.target, job.overwrite, job.target_kind) as partial:
        if job.adapter_only:
            write_adapter_only(partial, tunable, merge())
        else:
            write_checkpoint(partial, tunable, merge(), weights)
        if acceptance is not None:
            save_acceptance(partial, acceptance)
        write_card(partial, job, training.batches, outcome)
        lines = "".join(json.dumps(line) + "\n" for line in outcome.measurements)
        (partial / METRICS_FILE).write_text(lines, "utf-8")
