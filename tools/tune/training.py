"""Training: the steps of a course, on whatever processes and devices accelerate was launched with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.course import Course
from spaceport.tools.tune.packing import IGNORED, PackedRow, collate
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.trainee import COUNT, LOSS, RIGHT, Trainee, run
from spaceport.tools.tune.vocabulary import embedding_rows

_NOTHING = PackedRow(*(torch.tensor([value]).numpy() for value in (0, -1, IGNORED, 0)))


class Diverged(InputFault):
    """A training whose loss is not a number any more; the message says what to change."""


@dataclass(frozen=True)
class TrainingMeasurement:
    """What the steps since the last measurement came to; index 0 is the tokens' own next token, index i mask slot i."""

    step: int  # steps done
    steps: int  # of the whole training
    epoch: float
    rate: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    tokens: int  # fed since the training began, padding left out
    tokens_per_second: float
    seconds: float

    @property
    def mask_accuracies(self) -> tuple[float, ...]:
        return self.accuracies[1:]


class Training:
    """A trainee on its way through a course."""

    def __init__(self, accelerator: Accelerator, trainee: Trainee, course: Course, settings: TrainingSettings) -> None:
        self.accelerator = accelerator
        self.course = course
        self.step = 0  # steps done
        self.tokens = 0
        self._settings = settings
        optimizer = torch.optim.AdamW(
            _groups(trainee.model, settings.weight_decay),
            lr=settings.rate,
            betas=settings.betas,
            fused=_fused(accelerator),
        )
        self.trainee: nn.Module
        self.trainee, self._optimizer = accelerator.prepare(trainee, optimizer)
        self._sums = torch.zeros(3, settings.slots + 1, device=accelerator.device)
        self.norms = torch.zeros((), device=accelerator.device)  # of the gradients, in sum: one that is no number shows
        self._since = (time.perf_counter(), 0)
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the training ran, all its runs together."""
        return time.perf_counter() - self._began

    def unmeasured(self) -> list[list[float]]:
        """What the steps since the last measurement came to, over all processes: part of a state that is kept."""
        sums: Tensor = self.accelerator.reduce(self._sums, "sum")
        return cast(list[list[float]], sums.tolist())

    def go_on(self, step: int, tokens: int, seconds: float, unmeasured: list[list[float]]) -> None:
        """Be where an earlier run was when its state was kept."""
        self.step, self.tokens = step, tokens
        if self.accelerator.is_main_process:
            self._sums += torch.tensor(unmeasured, device=self._sums.device)
        self._began = time.perf_counter() - seconds
        self._since = (time.perf_counter(), tokens)

    def learn(self) -> None:
        """One step: the gradients of all its rows, and one update."""
        rows = self.course.rows(self.step)
        self.trainee.train()
        own, micro = self._share(rows)
        totals = _totals(rows, self._settings.slots)
        for first in range(0, len(own), micro):
            last = first + micro >= len(own)
            if last:
                self._backward(own[first : first + micro], totals)
            else:
                with self.accelerator.no_sync(self.trainee):
                    self._backward(own[first : first + micro], totals)
        self.norms += self.accelerator.clip_grad_norm_(self.trainee.parameters(), self._settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(row.ids.size for row in rows)

    def rate(self) -> float:
        """The learning rate of the next step: a linear warm-up, then a cosine to zero."""
        warm = max(1, round(self._settings.warmup * self.course.steps))
        if self.step < warm:
            return self._settings.rate * (self.step + 1) / warm
        share = (self.step - warm) / max(1, self.course.steps - warm)
        return self._settings.rate * (0.5 + 0.5 * math.cos(math.pi * share))

    def measure(self) -> TrainingMeasurement:
        """What came of the steps since the last measurement, over all processes."""
        sums: Tensor = self.accelerator.reduce(self._sums, "sum")
        now = time.perf_counter()
        before, tokens = self._since
        measured = self._measured(sums, (self.tokens - tokens) / max(1e-9, now - before), self.seconds)
        self._sums = torch.zeros_like(self._sums)
        self._since = (now, self.tokens)
        for loss in measured.losses:
            if not math.isfinite(loss):
                self._diverged("loss", loss)
        return measured

    def check(self) -> None:
        """Raise if the weights cannot be numbers any more: they are not worth keeping."""
        norms = float(self.norms)
        if not math.isfinite(norms):
            self._diverged("gradient", norms)

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop: they all do, after the same step."""
        if self.accelerator.num_processes == 1:
            return stop
        wanted = torch.tensor([int(stop)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(wanted, "sum").item())

    @torch.no_grad()
    def evaluate(self, rows: Sequence[PackedRow]) -> TrainingMeasurement:
        """What rows that are not learned come to."""
        self.trainee.eval()
        own, micro = self._share(sorted(rows, key=lambda row: -row.ids.size))
        sums = torch.zeros_like(self._sums)
        for first in range(0, len(own), micro):
            sums += run(self.trainee, collate(own[first : first + micro]).to(self.accelerator.device)).detach()
        return self._measured(self.accelerator.reduce(sums, "sum"), 0.0, self.seconds)

    def _diverged(self, what: str, found: float) -> NoReturn:
        mixed = self.accelerator.mixed_precision != "no"
        raise Diverged(
            f"the {what} is {found} after {self.step} steps: expected a number; lower --learning-rate "
            f"(now {self._settings.rate:g})" + (", or train without --bf16" if mixed else "")
        )

    def _backward(self, rows: Sequence[PackedRow], totals: Tensor) -> None:
        sums = run(self.trainee, collate(rows).to(self.accelerator.device))
        own, masks = totals.tolist()
        # processes average their gradients: each gives its share of the whole step's mean
        loss = sums[LOSS, 0] / own + self._settings.mask_weight * sums[LOSS, 1:].sum() / max(1.0, masks)
        self.accelerator.backward(loss * self.accelerator.num_processes)
        self._sums += sums.detach()

    def _share(self, rows: Sequence[PackedRow]) -> tuple[list[PackedRow], int]:
        """The rows that this process computes, and how many at once: every process makes as many calls."""
        processes = self.accelerator.num_processes
        each = -(-len(rows) // processes)
        own = list(rows[self.accelerator.process_index :: processes])
        return own + [_NOTHING] * (each - len(own)), self._settings.micro_batch

    def _measured(self, sums: Tensor, speed: float, seconds: float) -> TrainingMeasurement:
        counts = sums[COUNT].clamp(min=1)
        return TrainingMeasurement(
            step=self.step,
            steps=self.course.steps,
            epoch=self.step / self.course.epoch_steps,
            rate=self.rate(),
            losses=tuple((sums[LOSS] / counts).tolist()),
            accuracies=tuple((sums[RIGHT] / counts).tolist()),
            tokens=self.tokens,
            tokens_per_second=speed,
            seconds=seconds,
        )


def _totals(rows: Sequence[PackedRow], slots: int) -> Tensor:
    """How many tokens, and how many mask slots, a step has a loss for."""
    own = sum(int(((row.targets != IGNORED) & (row.mask_slots == 0)).sum()) for row in rows)
    masks = sum(int((row.mask_slots > 0).sum()) for row in rows)
    return torch.tensor([own, masks])


def _groups(model: PreTrainedModel, decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: vectors and embeddings go without."""
    bare = {id(rows) for rows in embedding_rows(model)}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in learned if parameter.dim() < 2 or id(parameter) in bare]
    decayed = [parameter for parameter in learned if parameter.dim() > 1 and id(parameter) not in bare]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _fused(accelerator: Accelerator) -> bool:
    return accelerator.device.type in ("cpu", "cuda")
