"""Kills: export, build and tune are killed at any moment; targets stay whole, and the next run needs no help."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from attack.opener import Opener
from attack.outcome import Budget, Outcome
from spaceport.exporter.tensorrt.engines import find_engine
from spaceport.graphs.contract.atomic_file import is_partial
from spaceport.runtime import open_bundle
from support.killed import Commands, kill, smallest_checkpoint

_POLL = 0.002  # seconds between two looks at the files
_MEASURED = ("metrics.jsonl", "README.md", "training.svg")  # files of a tuning with times


class Operation:
    """A command that writes `folder/target` from a checkpoint, with nothing else in the folder; this one exports."""

    def __init__(self, folder: Path, checkpoint: Path, commands: Commands, opener: Opener) -> None:
        folder.mkdir()
        self.folder, self.target, self.checkpoint = folder, folder / "target", checkpoint
        self.commands, self.opener = commands, opener
        self.seconds, self.changes, self.expected = 0.0, 0, ""

    def command(self, again: bool) -> list[str]:
        """Its arguments, or those of the run after a kill."""
        return ["export", str(self.checkpoint), str(self.target), "--overwrite"]

    def content(self) -> str:
        """What the target holds, or what is wrong with it; empty if it is absent."""
        return self.opener.open(self.target) if self.target.exists() else ""

    def prepare(self, present: bool) -> None:
        """Keep the result of an earlier run, or remove it."""
        if not present:
            shutil.rmtree(self.target, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Files that a finished run must not leave."""
        return sorted(path.name for path in self.folder.rglob("*") if is_partial(path) or ".training" in path.name)

    def watched(self, seconds: float = float("inf"), changes: float = float("inf")) -> int:
        """Run it, and kill it after a time or a number of changes of its files; returns the changes, notes the time."""
        began, seen, count = time.monotonic(), self._files(), 0
        process = self.commands.start(self.command(again=False))
        while not self.commands.ended() and time.monotonic() - began < seconds and count < changes:
            time.sleep(_POLL)
            count += seen != (seen := self._files())
        if min(seconds, changes) < float("inf"):
            kill(process)
        return count

    def measure(self) -> None:
        """Run it without a kill, for its time, its file changes and what it writes."""
        began, self.changes = time.monotonic(), self.watched()
        if code := self.commands.end():
            raise RuntimeError(f"{self.command(again=False)} ended with {code}")
        self.seconds, self.expected = time.monotonic() - began, self.content()

    def check(self, present: bool) -> str:
        """What is wrong after a kill, and after the command was run again; empty if nothing is."""
        found = self.content()
        if found != self.expected and (present or found):
            return f"the target has {found or 'nothing'}"
        if code := self.commands.run(self.command(again=True)):
            return f"the next run ended with {code}"
        if (found := self.content()) != self.expected:
            return f"the next run wrote {found or 'nothing'}"
        return f"left over: {left}" if (left := self.leftovers()) else ""

    def _files(self) -> list[tuple[str, int, int]]:
        found = []
        with suppress(FileNotFoundError):  # it is removed meanwhile
            for path in sorted(self.folder.rglob("*")):
                status = path.lstat()
                found.append((str(path), status.st_size, status.st_mtime_ns))
        return found


class Build(Operation):
    """A build of a TensorRT-RTX engine for another machine, which needs no GPU."""

    def __init__(self, folder: Path, checkpoint: Path, commands: Commands, opener: Opener) -> None:
        super().__init__(folder, checkpoint, commands, opener)
        self._without_engine = folder.with_name("without-engine")
        command = ["export", str(checkpoint), str(self._without_engine), "--lowering", "append"]
        if code := commands.run(command):
            raise RuntimeError(f"{command} ended with {code}")
        self.prepare(present=False)

    def command(self, again: bool) -> list[str]:
        options = "--backend tensorrt-rtx --target sm89 --max-seq-len 64 --max-requests 1 --rebuild"
        return ["build", str(self.target), *options.split()]

    def content(self) -> str:
        """The output of the graph, which no build may change; engines in the manifest must be complete."""
        manifest = open_bundle(self.target).manifest
        broken = [name for name in manifest.engines if find_engine(self.target, manifest, name) is None]
        return f"incomplete engines {broken}" if broken else self.opener.open(self.target)

    def prepare(self, present: bool) -> None:
        if not present:
            super().prepare(present)
            shutil.copytree(self._without_engine, self.target)

    def leftovers(self) -> list[str]:
        engines = {file.name for file in (self.target / "engines").iterdir()}
        return super().leftovers() + sorted(engines - set(open_bundle(self.target).manifest.engines))


class Tune(Operation):
    """A training of a few steps that saves its state in between."""

    def command(self, again: bool) -> list[str]:
        data, states = self.folder.with_name("data.jsonl"), self.target.with_name(self.target.name + ".training")
        texts = [json.dumps({"text": f"import json\n\nanswer = {number}\n"}) for number in range(4)]
        data.write_text("\n".join(texts) + "\n", "utf-8")
        options = "--max-steps 4 --epochs 4 --save-every 2 --mask-slots 2 --overwrite"
        resume = ["--resume"] if again and any(states.glob("step-*[0-9]")) else []
        return ["tune", str(self.checkpoint), str(self.target), str(data), *options.split(), *resume]

    def content(self) -> str:
        """A digest of the files without measured times."""
        if not self.target.exists():
            return ""
        digest = hashlib.sha256()
        for file in sorted(self.target.iterdir()):
            digest.update(file.name.encode() + b"\0" + (b"" if file.name in _MEASURED else file.read_bytes()))
        return f"files {digest.hexdigest()[:12]}"


def killed_commands(work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill exports, builds and tunings; every second one replaces an existing result."""
    outcome, commands, opener, folder = Outcome("kills", seed), Commands(), Opener(), work / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint = smallest_checkpoint(folder / "checkpoint", layers=2)
    kinds = [kind for kind in (Operation, Build, Tune) if kind is not Build or importlib.util.find_spec("tensorrt_rtx")]
    operations = [kind(folder / kind.__name__.lower(), checkpoint, commands, opener) for kind in kinds]
    for each in operations:
        each.measure()
    for number in budget.numbers():
        random, each = Random(f"{seed} {number}"), operations[number % len(operations)]
        present, by_time, share = random.random() < 0.5, random.random() < 0.5, random.random()
        each.prepare(present)
        limit = {"seconds": share * each.seconds} if by_time else {"changes": 1 + int(0.9 * share * each.changes)}
        each.watched(**limit)
        code = commands.end()
        fault = each.check(present)
        name = f"{each.command(again=False)[0]} {'killed' if code == -signal.SIGKILL else 'ended before the kill'}"
        outcome.note(
            f"{number} {name} at {limit}, exit {code}", fault or name, not fault and code in (0, -signal.SIGKILL)
        )
    commands.close()
    opener.close()
    shutil.rmtree(folder)
    return outcome
