"""Kills: `tune` and `distill` killed at random moments, and continued from what is left of them, or from cut off states.

The run after a kill writes the bytes of an undisturbed run. A damaged state is refused with an error, or makes no difference.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from attack.outcome import Budget, Outcome
from spaceport.tools.cli import INPUT, OK, USAGE
from support.killed import Commands, kill, smallest_checkpoint

KILLS = 100  # of each command, and as many damaged states

_LATE = (0.8, 1.05)  # share of a run's time in which every second kill comes: when files are written and moved
_TIMES = ("seconds", "tokens_per_second", "seconds_left")  # of a measurement


@dataclass(frozen=True)
class Victim:
    """A command, what it writes, and what it leaves behind when it is killed."""

    name: str
    arguments: list[str]
    target: Path
    state: Path
    stored: Callable[[Path], list[str]]  # what a state holds that the next run does not compute again
    kept: Callable[[list[str], Path, str], bool]  # whether the run after the kill has used it; also by its messages

    def clear(self) -> None:
        """Remove everything that the command wrote."""
        for path in (self.target, self.state):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def result(self) -> dict[str, str]:
        """A digest of each written file, without the times in measurements."""
        files = [self.target] if self.target.is_file() else sorted(self.target.rglob("*"))
        return {file.name: hashlib.sha256(_timeless(file)).hexdigest() for file in files}


@dataclass
class Runs:
    """Runs of a command in forked children of one process, and how long they take."""

    victim: Victim
    commands: Commands
    errors: Path
    expected: dict[str, str]
    seconds: float  # follows the load of the machine: shorter after a run that ended before its kill

    def killed(self, late: bool, random: Random) -> bool:
        """Start the command and kill it at a random moment; False: it has ended before, as it should."""
        self.victim.clear()
        child = self.commands.start(self.victim.arguments)
        time.sleep(self.seconds * random.uniform(*(_LATE if late else (0.0, 1.0))))
        kill(child)
        if self.commands.end() == -signal.SIGKILL:
            self.seconds *= 1.03
            return True
        self.seconds *= 0.9
        assert self.victim.result() == self.expected, f"two undisturbed runs of {self.victim.name} differ"
        return False

    def again(self) -> tuple[int, str]:
        """Run the command on what is there: its exit code, and what it printed to stderr."""
        self.errors.write_text("")
        return self.commands.run(self.victim.arguments), self.errors.read_text("utf-8")


def kills(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill both commands, then resume from damaged states; a quarter of the time for each."""
    folder = work / "kills"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome, part = Outcome("kills", seed), Budget(budget.seconds / 4, min(KILLS, budget.cases))
    for victim in (_tuning(folder), _distillation(bundle, folder)):
        errors = folder / f"{victim.name}.errors"
        commands = Commands(victim.arguments, errors)
        runs = Runs(victim, commands, errors, victim.result(), 0.0)
        victim.clear()
        started = time.perf_counter()
        assert runs.again()[0] == OK
        runs.seconds = time.perf_counter() - started
        states: list[Path] = []
        for number in part.numbers():
            random = Random(f"{seed} {victim.name} {number}")
            while not runs.killed(number % 2 == 1, random):
                outcome.counts[f"{victim.name} ended before the kill"] += 1
            states += _continued(runs, number, outcome)
        for number in part.numbers() if states else ():
            random = Random(f"{seed} damage {number}")
            _damaged(runs, random.choice(states), number, random, outcome)
        commands.close()
        outcome.figures[f"a run of {victim.name}"] = f"{runs.seconds:.1f} s"
    shutil.rmtree(folder)
    return outcome


def _continued(runs: Runs, number: int, outcome: Outcome) -> list[Path]:
    """Start a killed command again; returns a copy of the state that the kill has left, if it stores anything."""
    victim, case = runs.victim, f"{runs.victim.name} {number}"
    if victim.target.exists():  # only its state was left to remove
        outcome.note(case, f"{victim.name} complete at the kill", victim.result() == runs.expected)
        return []
    stored = victim.stored(victim.state)
    copies = []
    if stored:
        copies.append(copy := victim.state.with_name(f"state {victim.name} {number}"))
        (shutil.copytree if victim.state.is_dir() else shutil.copyfile)(victim.state, copy)
    code, shown = runs.again()
    resumed = f"{victim.name} {'resumed' if stored else 'began again'}"
    if code != OK or not victim.kept(stored, victim.target, shown):
        outcome.note(case, f"exit code {code}, {len(stored)} stored: {shown[-300:]}", False)
    elif victim.result() != runs.expected or victim.state.exists():
        outcome.note(case, f"{resumed} with other bytes", False)
    else:
        outcome.note(case, resumed, True)
    return copies


def _damaged(runs: Runs, state: Path, number: int, random: Random, outcome: Outcome) -> None:
    """Resume from a damaged state: it is refused with one line, or the result is that of an undisturbed run."""
    victim = runs.victim
    victim.clear()
    (shutil.copytree if state.is_dir() else shutil.copyfile)(state, victim.state)
    _truncate(victim.state, random)
    code, shown = runs.again()
    case = f"{victim.name} {number}, state truncated"
    last = (shown.splitlines() or [""])[-1]
    if code in (INPUT, USAGE) and last.startswith("spaceport: ") and "Traceback" not in shown:
        outcome.note(case, f"{victim.name}: truncated state refused", True)
    elif code == OK and victim.result() == runs.expected:
        outcome.note(case, f"{victim.name}: truncated state made no difference", True)
    else:
        outcome.note(case, f"exit code {code}: {shown[-500:]}", False)


def _tuning(folder: Path) -> Victim:
    """A training of one layer over six steps, each of which is saved."""
    data = folder / "data.jsonl"
    lines = [{"prompt": f"Say {number}.", "response": f"Yes, {number * number}."} for number in range(6)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    checkpoint, target = smallest_checkpoint(folder / "llama"), folder / "tuned"
    options = "--batch-size 2 --max-steps 6 --epochs 9 --anchors 2 --cutoff 48 --save-every 1 --log-every 1 --resume"

    def measured(state: Path) -> list[str]:
        saved = [path.name for path in state.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        step = max((int(name[5:]) for name in saved), default=0)
        return (state / "metrics.jsonl").read_text("utf-8").splitlines()[:step] if step else []

    def continued(stored: list[str], tuned: Path, shown: str) -> bool:
        return (tuned / "metrics.jsonl").read_text("utf-8").splitlines()[: len(stored)] == stored

    arguments = ["tune", str(checkpoint), str(target), str(data), *options.split()]
    return Victim("tune", arguments, target, folder / "tuned.training", measured, continued)


def _distillation(bundle: Path, folder: Path) -> Victim:
    """The answers to forty prompts."""
    prompts, target = folder / "prompts.jsonl", folder / "answers.jsonl"
    lines = [{"prompt": f"import json\nimport os\nanswer = {number}\n"} for number in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = "--max-tokens 24 --max-requests 4 --max-seq-len 128 --threads 1"

    def answered(state: Path) -> list[str]:
        return state.read_text("utf-8").split("\n")[:-1] if state.exists() else []  # a last line may be incomplete

    def continued(stored: list[str], answers: Path, shown: str) -> bool:
        done = re.search(r"(\d+)/40 prompts are answered", shown)
        return (int(done[1]) if done else 0) == len(stored)

    arguments = ["distill", str(bundle), str(prompts), str(target), *options.split()]
    return Victim("distill", arguments, target, folder / "answers.jsonl.partial", answered, continued)


def _timeless(file: Path) -> bytes:
    """The content of a file, without the times in measurements and in the model card."""
    if file.name == "metrics.jsonl":
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        return json.dumps([{name: line[name] for name in line if name not in _TIMES} for line in lines]).encode()
    return re.sub(rb"\| hours \|.*", b"", file.read_bytes())


def _truncate(state: Path, random: Random) -> None:
    """Cut off a file of a state; measurements are no part of it."""
    files = [file for file in state.rglob("*") if file.is_file() and file.name != "metrics.jsonl"]
    file = random.choice(sorted(files)) if state.is_dir() else state
    content = file.read_bytes()
    file.write_bytes(content[: random.randrange(max(1, len(content)))])
