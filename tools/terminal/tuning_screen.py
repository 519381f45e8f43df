"""Tuning screen: training progress as a bar on a terminal, as lines elsewhere, and as TensorBoard events."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from spaceport.exporter.interrupts import interrupts_handled
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.tools.terminal.screen import duration
from spaceport.tools.tune.job import TrainingCallbacks
from spaceport.tools.tune.training import Training, TrainingMeasurement

_SECONDS = 10.0  # between two progress lines


@contextmanager
def shown(events: Path | None) -> Iterator[TrainingCallbacks]:
    """Callbacks that show training progress on stderr, in the first of several processes only.

    The first interrupt ends the training after the current step and saves its state, the second one ends it at once.
    """
    with ExitStack() as stack:
        first = is_first()
        scalars = stack.enter_context(_events(events)) if events and first else None
        interrupts = stack.enter_context(_interrupts())
        view = _Terminal(stack) if sys.stderr.isatty() else _Lines()

        def stage(name: str) -> None:
            interrupts.patient = False
            if first:
                view.stage(name)

        def begun(training: Training) -> None:
            interrupts.patient = True
            if first:
                view.begun(training)

        def measured(found: TrainingMeasurement, kind: str) -> None:
            if first:
                view.measured(found, kind)
            if scalars:
                scalars(found, kind)

        def stepped(training: Training) -> None:
            if first:
                view.stepped(training)

        yield TrainingCallbacks(stage, _counted if first else _nothing, begun, measured, stepped, interrupts.received)


def is_first() -> bool:
    """Whether this is the first of the processes that accelerate or torchrun started: only it prints."""
    return os.environ.get("RANK", "0") == "0"


class _Lines:
    """Progress as lines, at most one every ten seconds."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._last = float("-inf")

    def stage(self, name: str) -> None:
        _say(f"{time.perf_counter() - self._started:6.1f} s  {name}")

    def begun(self, training: Training) -> None:
        _say(_beginning(training))

    def measured(self, found: TrainingMeasurement, kind: str) -> None:
        now = time.perf_counter()
        if kind == "validation" or found.step == found.steps or now - self._last >= _SECONDS:
            self._last = now
            _say(f"step {found.step}/{found.steps}  {described(found, kind)}  {_left(found)}")

    def stepped(self, training: Training) -> None:
        return


class _Terminal:
    """A spinner for each stage, and a progress bar with the last measurement for the training."""

    def __init__(self, stack: ExitStack) -> None:
        self._lives = stack.enter_context(ExitStack())  # rich can show one live display at a time
        self._progress: Any = None
        self._task: Any = None

    def stage(self, name: str) -> None:
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._show(SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), TimeElapsedColumn())
        self._task = self._progress.add_task(name, total=None)

    def begun(self, training: Training) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        line = TextColumn("{task.description}", markup=False)
        self._show(BarColumn(12), MofNCompleteColumn(), line)
        self._progress.console.print(_beginning(training), highlight=False)
        self._task = self._progress.add_task("", total=training.batches.steps, completed=training.step)

    def measured(self, found: TrainingMeasurement, kind: str) -> None:
        if kind == "validation":
            line = f"step {found.step}  {described(found, kind)}"
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            self._progress.update(self._task, description=f"{_left(found)}  {described(found, kind)}")

    def stepped(self, training: Training) -> None:
        self._progress.update(self._task, completed=training.step)

    def _show(self, *columns: Any) -> None:
        """End the current display and start one with these columns."""
        from rich.console import Console
        from rich.progress import Progress

        self._lives.close()
        self._progress = self._lives.enter_context(Progress(*columns, console=Console(stderr=True)))
        self._lives.callback(self._finish)

    def _finish(self) -> None:
        for task in self._progress.tasks:
            if task.total is None:  # a stage: end its spinner
                self._progress.update(task.id, total=1, completed=1)


def described(found: TrainingMeasurement, kind: str) -> str:
    """A measurement in one line."""
    masks = " ".join(_percent(accuracy) for accuracy in found.mask_accuracies)
    parts = []
    if found.losses[0] is not None:  # a frozen base's next-token loss is not measured while it trains
        parts.append(f"loss {found.losses[0]:.3f}  accuracy {_percent(found.accuracies[0])}")
    if masks:
        parts.append(f"mask slots {masks}")
    if found.corrected:
        parts.append(f"corrected {' '.join(_percent(accuracy) for accuracy in found.corrected)}")
    if kind == "validation" and found.acceptance:
        parts.append(f"tokens per step {1 + sum(filter(None, found.acceptance)):.2f}")
    loss = "  ".join(parts)
    return f"{loss}  {found.tokens_per_second:,.0f} rows/s" if kind == "training" else f"validation {loss}"


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.0%}"


def _beginning(training: Training) -> str:
    batches = training.batches
    after = f", {training.step} done" if training.step else ""
    after += f", {processes} processes" if (processes := training.accelerator.num_processes) > 1 else ""
    return f"{batches.samples} samples, {batches.steps} steps, {batches.steps / batches.epoch_steps:.2f} epochs{after}"


def _left(found: TrainingMeasurement) -> str:
    """The estimated time that is left, and the time of day at which the training ends."""
    if found.seconds_left is None:
        return ""
    end = datetime.now().astimezone() + timedelta(seconds=found.seconds_left)
    return f"{duration(found.seconds_left)} left, ends {end:%H:%M}"


def _counted(counts: Counter[str]) -> None:
    _say("samples: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # not click.echo: rich moves its live display only for print


def _nothing(counts: Counter[str]) -> None:
    return


class _Interrupts:
    """Counts interrupts: while it is patient, the first one only ends the training after the current step."""

    def __init__(self) -> None:
        self.patient = False
        self._count = 0

    def received(self) -> bool:
        return self._count > 0

    def handle(self, number: int) -> None:
        self._count += 1
        if not self.patient or self._count > 1:
            raise KeyboardInterrupt
        if is_first():
            _say("interrupted: finishing this step and saving the state for --resume; interrupt again to stop at once")


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    with interrupts_handled(interrupts.handle):
        yield interrupts


@contextmanager
def _events(folder: Path) -> Iterator[Callable[[TrainingMeasurement, str], None]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingDependency("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    with SummaryWriter(str(folder)) as writer:

        def write(found: TrainingMeasurement, kind: str) -> None:
            for index, (loss, accuracy) in enumerate(zip(found.losses, found.accuracies, strict=True)):
                if loss is None or accuracy is None:
                    continue
                name = f"mask_slot_{index}" if index else "next_token"
                writer.add_scalar(f"{kind}/loss/{name}", loss, found.step)
                writer.add_scalar(f"{kind}/accuracy/{name}", accuracy, found.step)
            if kind == "training":
                writer.add_scalar("training/learning_rate", found.learning_rate, found.step)
                writer.add_scalar("training/tokens_per_second", found.tokens_per_second, found.step)

        yield write
