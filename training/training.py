"""Training: optimizer steps over the training batches on the processes and devices of accelerate, and their saved states."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn

from spaceport.exporter.checkpoint_files import read_json
from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault
from spaceport.training.packed_model import (
    CORRECT,
    CORRECTED,
    CORRECTED_LOSS,
    COUNT,
    LOSS,
    REACHED,
    SUMS,
    PackedModel,
    run,
)
from spaceport.training.packing import IGNORED, PackedBatch, PackedRow, TrainingBatches, collate
from spaceport.training.settings import TrainingSettings
from spaceport.training.tunable_model import embedding_rows


@dataclass(frozen=True)
class StepBatches:
    """What one process computes in one training step."""

    micro_batches: tuple[PackedBatch, ...]
    totals: torch.Tensor  # text tokens and mask slots with a loss, over all processes
    rows: int  # text tokens and mask slots, over all processes


_PADDING = PackedRow(*(torch.tensor([value]).numpy() for value in (0, -1, IGNORED, 0, 0)))


@dataclass(frozen=True)
class TrainingMeasurement:
    """Means over the steps since the last measurement; index 0 is next-token prediction, index i is mask slot i."""

    step: int  # completed steps
    steps: int  # in the whole training
    epoch: float
    learning_rate: float
    losses: tuple[float | None, ...]  # None: not measured, as the next-token loss of a frozen base
    accuracies: tuple[float | None, ...]
    corrected: tuple[float | None, ...]  # accuracies of the mask slots with the draft correction; empty: none
    acceptance: tuple[float | None, ...]  # by depth: share of mask groups that predict at least that many tokens
    tokens: int  # trained so far, mask slots included, padding excluded
    tokens_per_second: float
    seconds: float
    seconds_left: float | None  # estimate; None: before the first step


class Training:
    """Trains a packed model on training batches."""

    def __init__(
        self, accelerator: Accelerator, packed_model: PackedModel, batches: TrainingBatches, settings: TrainingSettings
    ) -> None:
        self.accelerator = accelerator
        self.batches = batches
        self.step = 0  # completed steps
        self.tokens = 0
        self._settings = settings
        optimizer = torch.optim.AdamW(
            _groups(packed_model, settings.weight_decay),
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=accelerator.device.type in ("cpu", "cuda"),
        )
        self.packed_model: nn.Module
        self.packed_model, self._optimizer = accelerator.prepare(packed_model, optimizer)
        self._sums = torch.zeros(SUMS, settings.slots + 1, device=accelerator.device)
        self.norms = torch.zeros((), device=accelerator.device)  # sum of the gradient norms: not finite if any was not
        self._since = (time.perf_counter(), 0)
        self._began = time.perf_counter()
        self._first = (0, 0.0)  # steps and seconds of earlier runs, when this run began
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spaceport-prefetch")
        self._next: tuple[int, Future[StepBatches]] | None = None  # prepared while the step before it computes

    @property
    def seconds(self) -> float:
        """Training time in seconds, over all resumed runs."""
        return time.perf_counter() - self._began

    @property
    def extent(self) -> str:
        """Samples, steps and epochs of the training, and how many steps are done."""
        batches, processes = self.batches, self.accelerator.num_processes
        parts = [f"{batches.samples} samples", f"{batches.steps} steps"]
        parts.append(f"{batches.steps / batches.epoch_steps:.2f} epochs")
        parts += [f"{self.step} done"] * (self.step > 0) + [f"{processes} processes"] * (processes > 1)
        return ", ".join(parts)

    def progress(self) -> dict[str, Any]:
        """What `restore` needs beside the states of model and optimizer."""
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}

    def restore(self, step: int, tokens: int, seconds: float) -> None:
        """Continue from a saved state."""
        self.step, self.tokens = step, tokens
        self._began = time.perf_counter() - seconds
        self._first = (step, seconds)
        self._since = (time.perf_counter(), tokens)

    def finished(self) -> bool:
        """Whether all steps are done or the time budget is used up; one step is always done. The same in all processes."""
        if self._settings.time_budget is None or self.step in (0, self.batches.steps):
            return self.step == self.batches.steps
        return self._schedule_position() >= self.batches.steps

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the training ends; None before the first step of this process."""
        steps, spent = self.step - self._first[0], self.seconds - self._first[1]
        if not steps:
            return None
        left = spent / steps * (self.batches.steps - self.step)
        budget = self._settings.time_budget
        return max(0.0, left if budget is None else min(left, budget - self.seconds))

    def run_step(self) -> None:
        """Run one optimizer step."""
        self.packed_model.train()
        prepared = self._take()
        for index, batch in enumerate(prepared.micro_batches, 1):
            last = index == len(prepared.micro_batches)
            with nullcontext() if last else self.accelerator.no_sync(self.packed_model):
                self._backward(batch, prepared.totals)
        self.norms += self.accelerator.clip_grad_norm_(self.packed_model.parameters(), self._settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.tokens += prepared.rows

    def learning_rate(self) -> float:
        """Learning rate of the next step: linear warm-up, then cosine decay to zero."""
        position = self._schedule_position()
        warm = max(1, round(self._settings.warmup * self.batches.steps))
        if position < warm:
            return self._settings.learning_rate * min(1.0, (position + 1) / warm)
        share = (position - warm) / max(1, self.batches.steps - warm)
        return self._settings.learning_rate * (0.5 + 0.5 * math.cos(math.pi * min(1.0, share)))

    def measure(self) -> TrainingMeasurement:
        """Losses and accuracies of the steps since the last measurement, over all processes."""
        sums: Tensor = self.accelerator.reduce(self._sums, "sum")
        now = time.perf_counter()
        before, tokens = self._since
        measured = self._measured(sums, (self.tokens - tokens) / max(1e-9, now - before))
        self._sums = torch.zeros_like(self._sums)
        self._since = (now, self.tokens)
        for loss in measured.losses:
            if loss is not None and not math.isfinite(loss):
                self._diverged("loss", loss)
        return measured

    def check(self) -> None:
        """Raise if the weights cannot be numbers any more: they are not worth states."""
        norms = float(self.norms)
        if not math.isfinite(norms):
            self._diverged("gradient", norms)

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop; the same answer in all processes."""
        if self.accelerator.num_processes == 1:
            return stop
        wanted = torch.tensor([int(stop)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(wanted, "sum").item())

    @torch.no_grad()
    def evaluate(self, rows: Sequence[PackedRow]) -> TrainingMeasurement:
        """Losses and accuracies on validation rows."""
        self.packed_model.eval()
        sums = torch.zeros_like(self._sums)
        for batch in self._micro_batches(sorted(rows, key=lambda row: -row.ids.size)):
            sums += run(self.packed_model, batch.to(self.accelerator.device)).detach()
        return self._measured(self.accelerator.reduce(sums, "sum"), 0.0)

    def _diverged(self, what: str, value: float) -> NoReturn:
        mixed = self.accelerator.mixed_precision != "no"
        raise InputFault(
            f"the {what} is {value} after {self.step} steps: expected a finite number; lower --learning-rate "
            f"(now {self._settings.learning_rate:g})" + (", or train without --bf16" if mixed else "")
        )

    def _schedule_position(self) -> float:
        """Position in the learning-rate schedule, in steps: completed steps, or the used share of the time budget.

        The same in all processes, which all call it: another learning rate would be another model.
        """
        budget = self._settings.time_budget
        if budget is None:
            return self.step
        seconds = torch.tensor(self.seconds, device=self.accelerator.device)
        return max(self.step, float(self.accelerator.reduce(seconds, "mean")) / budget * self.batches.steps)

    def _take(self) -> StepBatches:
        """The batches of the next step; those of the step after it are begun in a thread."""
        step, following = self.step, self.step + 1
        ready = self._next is not None and self._next[0] == step
        prepared = self._next[1].result() if self._next is not None and ready else self._prepare(step)
        begin = following < self.batches.steps
        self._next = (following, self._pool.submit(self._prepare, following)) if begin else None
        return prepared

    def _prepare(self, step: int) -> StepBatches:
        rows = self.batches.rows(step)
        return StepBatches(
            tuple(self._micro_batches(rows)), _totals(rows, self._settings.slots), sum(row.ids.size for row in rows)
        )

    def _backward(self, batch: PackedBatch, totals: Tensor) -> None:
        sums = run(self.packed_model, batch.to(self.accelerator.device))
        own, masks = totals.tolist()
        # DDP averages gradients over processes: scale to the mean over the whole step
        of_masks = sums[LOSS, 1:].sum() + sums[CORRECTED_LOSS].sum()
        loss = sums[LOSS, 0] / own + self._settings.mask_weight * of_masks / max(1.0, masks)
        self.accelerator.backward(loss * self.accelerator.num_processes)
        self._sums += sums.detach()

    def _micro_batches(self, rows: Sequence[PackedRow]) -> Iterator[PackedBatch]:
        """This process's batches of rows; padded so that all processes run the same number of forward passes."""
        processes, size = self.accelerator.num_processes, self._settings.micro_batch_size
        each = -(-len(rows) // processes)
        own = list(rows[self.accelerator.process_index :: processes])
        own += [_PADDING] * (each - len(own))
        for first in range(0, each, size):
            yield collate(own[first : first + size], self._settings.mask_layout.group)

    def _measured(self, sums: Tensor, speed: float) -> TrainingMeasurement:
        counts = sums[COUNT].clamp(min=1)
        measured = sums[COUNT].bool().tolist()
        losses, accuracies, corrected, reached = (
            [value if known else None for value, known in zip((sums[row] / counts).tolist(), measured, strict=True)]
            for row in (LOSS, CORRECT, CORRECTED, REACHED)
        )
        has_correction = bool(sums[CORRECTED_LOSS].any())
        return TrainingMeasurement(
            step=self.step,
            steps=self.batches.steps,
            epoch=self.step / self.batches.epoch_steps,
            learning_rate=self.learning_rate(),
            losses=tuple(losses),
            accuracies=tuple(accuracies),
            corrected=tuple(corrected[1:] if has_correction else ()),
            acceptance=tuple(reached[1:]),
            tokens=self.tokens,
            tokens_per_second=speed,
            seconds=self.seconds,
            seconds_left=self.seconds_left,
        )


def _totals(rows: Sequence[PackedRow], slots: int) -> Tensor:
    """Number of text tokens and of mask slots with a loss in a step."""
    own = sum(int(((row.targets != IGNORED) & (row.mask_slots == 0)).sum()) for row in rows)
    masks = sum(int((row.mask_slots > 0).sum()) for row in rows)
    return torch.tensor([own, masks])


def _groups(packed_model: PackedModel, decay: float) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay; vectors and embeddings have none."""
    embeddings = {id(rows) for rows in embedding_rows(packed_model.model)}
    trained = [parameter for parameter in packed_model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in trained if parameter.dim() < 2 or id(parameter) in embeddings]
    decayed = [parameter for parameter in trained if parameter.dim() > 1 and id(parameter) not in embeddings]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


METRICS_FILE = "metrics.jsonl"
_FACTS_FILE = "training.json"
_PROGRESS_FILE = "progress.json"
_KEPT = 2  # newest states
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
_DAMAGE = (*_WRITE_ERRORS, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError, InputFault)


class TrainingStates:
    """Folder `TARGET.training` beside the target checkpoint: accelerate's states of the training, and its measurements."""

    def __init__(self, target: Path, accelerator: Accelerator, resume: bool) -> None:
        self.folder = target.absolute().with_name(target.absolute().name + ".training")
        self._accelerator = accelerator
        if self._states() and not resume:
            raise InputFault(
                f"{self.folder}: holds an unfinished training for this target: continue it with --resume, or remove the folder"
            )

    def begin(self, facts: dict[str, Any]) -> None:
        """Create the folder of a new training; raise if a saved one, or another process, has other inputs or settings."""
        states = self._states()
        if len({*gather_object([json.dumps([[state.name for state in states], facts])])}) > 1:
            raise InputFault(
                f"the processes of this training have other data, settings or states in {self.folder}: start all with the same "
                "options and files, on a common file system or with copies of this folder"
            )
        if not states:
            if self._accelerator.is_main_process:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                replace_text(self.folder / _FACTS_FILE, json.dumps(facts, indent=2) + "\n")
            return
        with self._damage_named(self.folder / _FACTS_FILE):
            saved = read_json(self.folder / _FACTS_FILE)
        known = json.loads(json.dumps(facts))
        wrong = [
            f"{name}: {saved.get(name)} before, {now} now" for name, now in known.items() if saved.get(name) != now
        ]
        if wrong:
            raise InputFault(
                f"{self.folder}: started with other settings ({'; '.join(wrong)}): resume with the original settings, or remove "
                "the folder"
            )

    def save(self, training: Training) -> None:
        """Save the state of a training; a state has its final name once it is complete."""
        training.check()
        state = self.folder / f"step-{training.step:08d}"
        partial = state.with_name(state.name + ".partial")
        main, progress = self._accelerator.is_main_process, training.progress()
        with write_errors(f"the state after step {training.step} in {self.folder}"):
            self._accelerator.save_state(str(partial))
            if main:
                (partial / _PROGRESS_FILE).write_text(json.dumps(progress) + "\n", "utf-8")
        self._accelerator.wait_for_everyone()
        if main:
            partial.rename(state)
            for old in self._states()[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self._accelerator.wait_for_everyone()

    def restore(self, training: Training) -> None:
        """Load the last saved state into a training; without one it starts from the beginning."""
        lines: list[str] = []
        if states := self._states():
            with self._damage_named(states[-1]):
                # dropout continues from it; accelerate goes on without it
                (states[-1] / f"random_states_{self._accelerator.process_index}.pkl").stat()
                self._accelerator.load_state(str(states[-1]))
                training.restore(**read_json(states[-1] / _PROGRESS_FILE))
            # lines of steps that are repeated are left out, and a last one that was cut off
            whole = [line for line in self._metrics().splitlines(keepends=True) if line.endswith("}\n")]
            lines = [line for line in whole if json.loads(line)["step"] <= training.step]
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            for partial in self.folder.glob("step-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)
            replace_text(self.folder / METRICS_FILE, "".join(lines))

    def log(self, measured: TrainingMeasurement, kind: str) -> None:
        """Append a measurement to metrics.jsonl."""
        if self._accelerator.is_main_process:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **asdict(measured)}) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far."""
        return [json.loads(line) for line in self._metrics().splitlines()]

    def remove(self) -> None:
        """Delete the folder of a finished training."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _metrics(self) -> str:
        file = self.folder / METRICS_FILE
        return file.read_text("utf-8") if file.exists() else ""

    def _states(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))

    @contextmanager
    def _damage_named(self, path: Path) -> Iterator[None]:
        """Turn what damaged files cause into an error that names them."""
        try:
            yield
        except _DAMAGE as error:
            raise InputFault(
                f"{path}: is damaged ({_reason(error)}): remove it to continue from an earlier state, or remove {self.folder} "
                "to start again"
            ) from error


@contextmanager
def write_errors(what: str) -> Iterator[None]:
    """Turn a failed write into an error that says how to continue."""
    try:
        yield
    except _WRITE_ERRORS as error:
        raise InputFault(
            f"cannot write {what} ({_reason(error)}): free disk space, and continue from the last state with --resume"
        ) from error


def _reason(error: BaseException) -> str:
    """First line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
