"""Kills: exports and builds are killed at any moment; targets stay whole, and the next run needs no help."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import time
from pathlib import Path
from random import Random

from attack.opener import Opener
from attack.outcome import Budget, Outcome
from spaceport.exporter.tensorrt.engines import find_engine
from spaceport.graphs.contract.atomic_file import is_partial
from spaceport.runtime import open_bundle
from support.killed import Commands, kill, smallest_checkpoint

_BUILD = ["--backend", "tensorrt-rtx", "--target", "sm89", "--max-seq-len", "64", "--max-requests", "1", "--rebuild"]


def killed_commands(work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill exports and builds; every second export replaces a bundle."""
    outcome, commands, opener, folder = Outcome("kills", seed), Commands(), Opener(), work / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint, target, plain = smallest_checkpoint(folder / "checkpoint"), folder / "target", folder / "plain"
    exporting = ["export", str(checkpoint), str(target), "--overwrite"]
    kinds = {"export": exporting}
    if importlib.util.find_spec("tensorrt_rtx"):  # builds engines for other machines without a GPU
        kinds["build"] = ["build", str(target), *_BUILD]

    def content() -> str:
        """What the target holds, or what is wrong with it; empty if it is absent."""
        if not target.exists():
            return ""
        manifest = open_bundle(target).manifest
        broken = [name for name in manifest.engines if find_engine(target, manifest, name) is None]
        return f"incomplete engines {broken}" if broken else opener.open(target)

    def run(command: list[str]) -> float:
        """The seconds that a command takes."""
        began = time.monotonic()
        if code := commands.run(command):
            raise RuntimeError(f"{command} ended with {code}")
        return time.monotonic() - began

    run(["export", str(checkpoint), str(plain), "--lowering", "append"])
    expected, seconds = opener.open(plain), {}
    for name, command in kinds.items():
        shutil.copytree(plain, target, dirs_exist_ok=True)
        seconds[name] = run(command)
    for number in budget.numbers():
        random, name = Random(f"{seed} {number}"), [*kinds][number % len(kinds)]
        present, when = name == "build" or random.random() < 0.5, random.random() * seconds[name]
        shutil.rmtree(target)
        if present:
            shutil.copytree(plain, target)
        process = commands.start(kinds[name])
        time.sleep(when)
        kill(process)
        code, found = commands.end(), content()
        fault = "" if found == expected or not (present or found) else f"the target has {found or 'nothing'}"
        run(kinds[name])
        if (found := content()) != expected:
            fault = fault or f"the next run wrote {found or 'nothing'}"
        engines = set(open_bundle(target).manifest.engines)
        left = [path.name for path in target.rglob("*") if is_partial(path)]
        left += [path.name for path in target.glob("engines/*") if path.name not in engines]
        fault = fault or (f"left over: {left}" if left else "")
        ended = f"{name} {'killed' if code == -signal.SIGKILL else 'ended before the kill'}"
        outcome.note(f"{number} {ended} after {when:.2f} s", fault or ended, not fault)
    commands.close()
    opener.close()
    shutil.rmtree(folder)
    return outcome
