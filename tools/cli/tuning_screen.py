"""Tuning screen: how a training goes, as a progress bar on a terminal or as lines in a pipe, and for TensorBoard."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from spaceport.graphs.faults import MissingPart
from spaceport.tools.cli.screen import stages
from spaceport.tools.tune.training import Measured, Training
from spaceport.tools.tune.tuning import Hearer

_SECONDS = 10.0  # between lines in a pipe


@contextmanager
def shown(events: Path | None) -> Iterator[Hearer]:
    """A hearer that shows a tuning on stderr; an interrupt lets it end a step and keep its state, a second one does not."""
    with ExitStack() as stack:
        scalars = stack.enter_context(_events(events)) if events else None
        stop = stack.enter_context(_interrupts())
        stage = stack.enter_context(stages())
        view = stack.enter_context(_bar()) if sys.stderr.isatty() else _Lines()

        def measured(found: Measured, kind: str) -> None:
            view.measured(found, kind)
            if scalars:
                scalars(found, kind)

        yield Hearer(stage, _counted, view.begun, measured, view.stepped, stop)


class _Lines:
    """A line from time to time."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def begun(self, training: Training) -> None:
        _say(_beginning(training))

    def measured(self, found: Measured, kind: str) -> None:
        now = time.perf_counter()
        if kind == "validation" or found.step == found.steps or now - self._last >= _SECONDS:
            self._last = now
            _say(f"step {found.step}/{found.steps}  {told(found, kind)}  {_left(found)}")

    def stepped(self, training: Training) -> None:
        return


class _Bar:
    """A bar that grows with each step, with the last measurement behind it."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None

    def begun(self, training: Training) -> None:
        _say(_beginning(training))
        self._task = self._progress.add_task("", total=training.course.steps, completed=training.step)

    def measured(self, found: Measured, kind: str) -> None:
        if kind == "validation":
            self._progress.console.print(f"step {found.step}  {told(found, kind)}", highlight=False)
        else:
            self._progress.update(self._task, description=told(found, kind))

    def stepped(self, training: Training) -> None:
        self._progress.update(self._task, completed=training.step)


def told(found: Measured, kind: str) -> str:
    """A measurement in one line."""
    masks = " ".join(f"{accuracy:.0%}" for accuracy in found.mask_accuracies)
    loss = f"loss {found.losses[0]:.3f}  right {found.accuracies[0]:.0%}" + (f"  mask slots {masks}" if masks else "")
    return f"{loss}  {found.tokens_per_second:,.0f} tokens/s" if kind == "training" else f"validation {loss}"


def _beginning(training: Training) -> str:
    course = training.course
    after = f", {training.step} of them done" if training.step else ""
    return f"{course.samples} samples, {course.steps} steps, {course.steps / course.epoch_steps:.2f} epochs{after}"


def _left(found: Measured) -> str:
    seconds = round(found.seconds / max(1, found.step) * (found.steps - found.step))
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02} left"


def _counted(counts: Counter[str]) -> None:
    _say("samples: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _bar() -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether an interrupt came; the second one is raised at once."""
    came: list[int] = []

    def heard(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        _say("interrupted: this step is finished and the state kept; once more to end at once")

    kept = {kind: signal.signal(kind, heard) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


@contextmanager
def _events(folder: Path) -> Iterator[Callable[[Measured, str], None]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingPart("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    with SummaryWriter(str(folder)) as writer:

        def write(found: Measured, kind: str) -> None:
            for index, (loss, right) in enumerate(zip(found.losses, found.accuracies, strict=True)):
                name = f"mask_slot_{index}" if index else "next_token"
                writer.add_scalar(f"{kind}/loss/{name}", loss, found.step)
                writer.add_scalar(f"{kind}/right/{name}", right, found.step)
            if kind == "training":
                writer.add_scalar("training/rate", found.rate, found.step)
                writer.add_scalar("training/tokens_per_second", found.tokens_per_second, found.step)

        yield write
