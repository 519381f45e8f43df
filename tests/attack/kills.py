"""Kills: export, build and tune are killed at any moment; targets stay whole, and the next run needs no help."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from attack.opener import Opener
from attack.operations import Build, Export, Operation, Tune
from attack.outcome import Budget, Outcome
from support.killed import Commands, kill, smallest_checkpoint

_PATIENCE = 120.0  # seconds to open a bundle on a busy machine
_POLL = 0.002  # seconds between two looks at the files


@dataclass
class FileChanges:
    """Counts how often the files of a folder change, by their names, sizes and times."""

    folder: Path
    count: int = 0
    _seen: frozenset[tuple[str, int, int]] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._seen = self._now()

    def look(self) -> int:
        """Compare with the last look; returns the changes so far."""
        if (now := self._now()) != self._seen:
            self._seen, self.count = now, self.count + 1
        return self.count

    def _now(self) -> frozenset[tuple[str, int, int]]:
        found = []
        for folder, _, names in os.walk(self.folder):  # skips folders that are removed meanwhile
            for path in (Path(folder), *(Path(folder, name) for name in names)):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    found.append((str(path), status.st_size, status.st_mtime_ns))
        return frozenset(found)


@dataclass
class Measured:
    """An operation, and how long its last whole run took."""

    operation: Operation
    commands: Commands
    seconds: float = 0.0
    changes: int = 0
    expected: str = ""

    def measure(self) -> None:
        """Run it without a kill, for its time, its file changes and what it writes."""
        began, seen = time.monotonic(), FileChanges(self.operation.folder)
        self.commands.start(self.operation.command(again=False))
        while not self.commands.ended():
            seen.look()
            time.sleep(_POLL)
        if code := self.commands.end():
            raise RuntimeError(f"{self.operation.command(again=False)} ended with {code}")
        self.seconds, self.changes, self.expected = time.monotonic() - began, seen.count, self.operation.content()

    def killed(self, random: Random) -> tuple[str, int]:
        """Run it and kill it: after a random time, or at a random change of its files; says when and how it ended."""
        by_time, share = random.random() < 0.5, random.random()
        seen, began = FileChanges(self.operation.folder), time.monotonic()
        process = self.commands.start(self.operation.command(again=False))
        change, seconds = 1 + int(0.9 * share * self.changes), share * self.seconds
        while not self.commands.ended():
            if (time.monotonic() - began >= seconds) if by_time else (seen.look() >= change):
                break
            time.sleep(_POLL)
        kill(process)
        return f"after {seconds:.2f} s" if by_time else f"at file change {change}", self.commands.end()

    def check(self, present: bool) -> str:
        """What is wrong after a kill, and after the command was run again; empty if nothing is."""
        found = self.operation.content()
        if found != self.expected and (present or found):
            return f"the target has {found or 'nothing'}"
        began = time.monotonic()
        if code := self.commands.run(self.operation.command(again=True)):
            return f"the next run ended with {code}"
        self.seconds = time.monotonic() - began
        if (found := self.operation.content()) != self.expected:
            return f"the next run wrote {found or 'nothing'}"
        return f"left over: {left}" if (left := self.operation.leftovers()) else ""


def killed_commands(work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill exports, builds and tunings; every second one replaces an existing result."""
    outcome, commands, opener, folder = Outcome("kills", seed), Commands(), Opener(_PATIENCE), work / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint = smallest_checkpoint(folder / "checkpoint", layers=2)
    operations = [
        Measured(kind(folder / kind.__name__.lower(), checkpoint, commands, opener), commands)
        for kind in (Export, Build, Tune)
        if kind.available()
    ]
    for each in operations:
        each.measure()
    kills = 0
    for number in budget.numbers():
        random, each = Random(f"{seed} {number}"), operations[number % len(operations)]
        name, present = type(each.operation).__name__.lower(), random.random() < 0.5
        each.operation.prepare(present)
        when, code = each.killed(random)
        fault = each.check(present)
        ended = "killed" if code == -signal.SIGKILL else "ended before the kill"
        fine = not fault and code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
        outcome.note(f"{number} {name} {when}, exit {code}", fault or f"{name} {ended}", fine)
    outcome.figures["kills"] = str(kills)
    commands.close()
    opener.close()
    shutil.rmtree(folder)
    return outcome
