"""Outcome: what a part of the campaign has tried and found, as a table."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHOWN = 10  # failures that are printed


@dataclass
class Outcome:
    """Counts of one part of the campaign; any failure makes the campaign fail."""

    attack: str
    seed: int
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # what happened, without failures
    failures: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)  # measurements
    seconds: float = 0.0  # until its last case
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, case: str, result: str, fine: bool) -> None:
        """Count a case, from any OS thread."""
        with self._lock:
            self.cases += 1
            self.counts[result] += 1
            self.seconds = time.monotonic() - self._began
            if not fine:
                self.failures.append(f"{case}: {result}")


@dataclass(frozen=True)
class Budget:
    """How long a part may run, and how many cases it tries at most."""

    seconds: float
    cases: int = 10**9

    def numbers(self) -> Iterator[int]:
        """Numbers of cases until the time or the number is spent; there is always one."""
        end = time.monotonic() + self.seconds
        for number in range(self.cases):
            if number and time.monotonic() > end:
                return
            yield number


def memory_of(process: int, name: str = "VmRSS") -> float:
    """MiB of memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def open_files_of(process: int) -> int:
    """Number of files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))  # noqa: PTH208  (open files, not a folder)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown, failures below it."""
    lines = ["| attack | cases | failures | seconds | seed | results |", "|---|---|---|---|---|---|"]
    for each in outcomes:
        results = [f"{count} {name}" for name, count in each.counts.most_common()]
        results += [f"{name} {value}" for name, value in each.figures.items()]
        cells = (each.attack, each.cases, len(each.failures), f"{each.seconds:.0f}", each.seed, ", ".join(results))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for each in outcomes:
        lines += [f"\n{each.attack}: {failure}" for failure in each.failures[:_SHOWN]]
    return "\n".join(lines)
