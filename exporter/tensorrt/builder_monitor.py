"""Builder monitor: what TensorRT says while it builds and how far it is, heard without a line on the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# Hears how much of a build is done, from 0 to 1, and the name of the phase that runs.
OnProgress = Callable[[float, str], None]

_WARNING = 2  # ILogger.Severity: 0 internal error, 1 error, 2 warning, 3 info, 4 verbose
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass
class BuildMessages:
    """What the builder said: errors and warnings as they came, and the numbers among the rest."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    activation: int = 0  # bytes of the profile that needs most

    def hear(self, severity: int, text: str) -> None:
        if severity <= _WARNING:
            (self.warnings if severity == _WARNING else self.errors).append(text)
        elif found := _ACTIVATION.search(text):
            self.activation = max(self.activation, int(found[1]))


@dataclass
class BuildProgress:
    """How far nested phases are; it never goes back, and a build is stopped through it."""

    hear: OnProgress
    stopped: Callable[[], bool]
    done: float = 0.0
    fault: BaseException | None = None  # of whoever hears: raised when the builder has returned
    _phases: list[list[Any]] = field(default_factory=list)  # name, steps done, steps

    def begin(self, name: str, steps: int) -> None:
        self._phases.append([name, 0, max(1, steps)])
        self._tell()

    def step(self, name: str, step: int) -> bool:
        for phase in self._phases:
            if phase[0] == name:
                phase[1] = step + 1
        self._tell()
        return self.fault is None and not self.stopped()

    def end(self, name: str) -> None:
        self._phases = [phase for phase in self._phases if phase[0] != name]

    def _tell(self) -> None:
        share, done = 1.0, 0.0
        for _, steps, total in self._phases:
            done += share * min(steps, total) / total
            share /= total
        self.done = max(self.done, min(done, 1.0))
        try:
            self.hear(self.done, self._phases[0 if len(self._phases) < 2 else 1][0])
        except BaseException as error:  # noqa: BLE001  (through the builder's own frames it would end the process)
            self.fault = error


@cache
def _log(library: Any) -> Any:
    """The one logger of a library: it keeps the address of its first one for as long as the process lives."""

    class Log(library.ILogger):  # type: ignore[misc]
        said = BuildMessages()

        def log(self, severity: Any, text: str) -> None:
            self.said.hear(int(severity), text)

    return Log()


def logger_of(library: Any, said: BuildMessages) -> Any:
    """The logger of this library; from now on it keeps there what is said."""
    log = _log(library)
    log.said = said
    return log


def monitor_of(library: Any, advance: BuildProgress) -> Any:
    """A progress monitor of this library that tells how far it is."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            advance.begin(name, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return advance.step(name, step)

        def phase_finish(self, name: str) -> None:
            advance.end(name)

    return Monitor()
