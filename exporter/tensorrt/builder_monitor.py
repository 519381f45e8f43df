"""Builder monitor: collect TensorRT's messages and progress during a build instead of printing them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# Called with the completed fraction of a build (0 to 1) and the name of the current phase.
OnProgress = Callable[[float, str], None]

_WARNING = 2  # ILogger.Severity: 0 internal error, 1 error, 2 warning, 3 info, 4 verbose
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass
class BuildMessages:
    """Messages of the builder: errors and warnings in order, and the activation memory from its info messages."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    activation: int = 0  # activation memory in bytes, the maximum over all profiles

    def add(self, severity: int, text: str) -> None:
        if severity <= _WARNING:
            (self.warnings if severity == _WARNING else self.errors).append(text)
        elif found := _ACTIVATION.search(text):
            self.activation = max(self.activation, int(found[1]))


@dataclass
class BuildProgress:
    """Progress over nested build phases; the completed fraction never decreases. Also cancels a build."""

    on_progress: OnProgress
    is_cancelled: Callable[[], bool]
    done: float = 0.0
    fault: BaseException | None = None  # raised by `on_progress`; to be raised again after the builder returned
    _phases: list[list[Any]] = field(default_factory=list)  # name, completed steps, total steps

    def begin(self, name: str, steps: int) -> None:
        self._phases.append([name, 0, max(1, steps)])
        self._report()

    def step(self, name: str, step: int) -> bool:
        for phase in self._phases:
            if phase[0] == name:
                phase[1] = step + 1
        self._report()
        return self.fault is None and not self.is_cancelled()

    def end(self, name: str) -> None:
        self._phases = [phase for phase in self._phases if phase[0] != name]

    def _report(self) -> None:
        share, done = 1.0, 0.0
        for _, steps, total in self._phases:
            done += share * min(steps, total) / total
            share /= total
        self.done = max(self.done, min(done, 1.0))
        try:
            self.on_progress(self.done, self._phases[0 if len(self._phases) < 2 else 1][0])
        except BaseException as error:  # noqa: BLE001  (an exception in a C++ callback would end the process)
            self.fault = error


@cache
def _log(library: Any) -> Any:
    """The logger of a library: one per process, since the library keeps the address of its first logger."""

    class Log(library.ILogger):  # type: ignore[misc]
        messages = BuildMessages()

        def log(self, severity: Any, text: str) -> None:
            self.messages.add(int(severity), text)

    return Log()


def logger_of(library: Any, messages: BuildMessages) -> Any:
    """The logger of this library, which from now on adds to `messages`."""
    log = _log(library)
    log.messages = messages
    return log


def monitor_of(library: Any, progress: BuildProgress) -> Any:
    """A progress monitor of this library that updates `progress`."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress.begin(name, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return progress.step(name, step)

        def phase_finish(self, name: str) -> None:
            progress.end(name)

    return Monitor()
