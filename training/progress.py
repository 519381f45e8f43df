"""Progress of a training as lines on stderr, and interrupts that end it after the current step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from spaceport.exporter.interrupts import interrupts_handled
from spaceport.training.training import TrainingMeasurement

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
    if measured.mask_accuracies:
        parts.append(f"mask slots {' '.join(map(_percent, measured.mask_accuracies))}")
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
