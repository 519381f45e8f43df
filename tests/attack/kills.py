"""Kills: `tune` and `distill` killed at random moments, and continued from what is left of them, or from damaged states.

The run after a kill writes the bytes of an undisturbed run. A damaged state is refused with an error, or continued.
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

from attack.mutations import damage
from attack.outcome import Budget, Outcome
from spaceport.tools.cli import INPUT, OK, USAGE
from support.killed import Commands, kill, smallest_checkpoint

KILLS = 100  # of each command, and as many damaged states
_PROMPTS = 40
_TIMES = ("seconds", "tokens_per_second", "seconds_left")  # of a measurement


@dataclass(frozen=True)
class Victim:
    """A command, what it writes, and what it leaves behind when it is killed."""

    arguments: list[str]
    target: Path
    state: Path
    resume: list[str]  # options of a run that continues
    stored: Callable[[], list[str]]  # what the state holds that the next run does not compute again
    kept: Callable[[list[str], str], bool]  # whether the run after the kill has used it; also by its messages

    @property
    def name(self) -> str:
        return self.arguments[0]

    def clear(self) -> None:
        """Remove everything that the command wrote."""
        shutil.rmtree(self.target, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)
        for file in (self.target, self.state):
            file.unlink(missing_ok=True)

    def result(self) -> dict[str, str]:
        """A digest of each written file, without the times in measurements and in the model card."""
        files = [self.target] if self.target.is_file() else sorted(self.target.rglob("*"))
        return {file.name: hashlib.sha256(_timeless(file)).hexdigest() for file in files}


def kills(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill both commands, then resume from damaged states; a quarter of the time for each."""
    folder = work / "kills"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome, part = Outcome("kills", seed), Budget(budget.seconds / 4, min(KILLS, budget.cases))
    for victim in (_tuning(folder), _distillation(bundle, folder)):
        _attack(victim, folder / f"{victim.name}.errors", seed, part, outcome)
    shutil.rmtree(folder)
    return outcome


def _attack(victim: Victim, errors: Path, seed: int, part: Budget, outcome: Outcome) -> None:
    commands, states = Commands(victim.arguments, errors), list[Path]()

    def run(options: list[str]) -> tuple[int, str]:
        """Run the command on what is there: its exit code, and what it printed to stderr."""
        errors.write_text("")
        return commands.run([*victim.arguments, *options]), errors.read_text("utf-8")

    expected = victim.result()
    victim.clear()
    started = time.perf_counter()
    assert run([])[0] == OK
    seconds = time.perf_counter() - started
    for number in part.numbers():
        random, case = Random(f"{seed} {victim.name} {number}"), f"{victim.name} {number}"
        while True:
            victim.clear()
            child = commands.start(victim.arguments)
            # every second kill comes late, when files are written and moved
            time.sleep(seconds * random.uniform(*((0.8, 1.05) if number % 2 else (0.0, 1.0))))
            kill(child)
            if commands.end() == -signal.SIGKILL:
                break
            seconds *= 0.9  # it had ended before: follow the load of the machine
        seconds *= 1.03
        if victim.target.exists():  # only its state was left to remove
            outcome.note(case, f"{victim.name} complete at the kill", victim.result() == expected)
            continue
        if stored := victim.stored():
            states.append(victim.state.with_name(f"state {case}"))
            _copy(victim.state, states[-1])
        code, shown = run(victim.resume if stored else [])
        fine = code == OK and victim.kept(stored, shown) and victim.result() == expected
        result = f"{victim.name} {'resumed' if stored else 'began again'}"
        outcome.note(case, result if fine else f"exit code {code}: {shown[-300:]}", fine)
    for number in part.numbers() if states else ():
        random = Random(f"{seed} damage {number}")
        victim.clear()
        _copy(random.choice(states), victim.state)
        files = sorted(file for file in victim.state.rglob("*") if file.is_file()) or [victim.state]
        way = damage(random.choice(files), random, ("flip", "truncate"))
        code, shown = run(victim.resume)
        refused = code in (INPUT, USAGE) and "spaceport: " in shown
        fine = (refused or code == OK) and "Traceback" not in shown
        result = f"{victim.name}: damaged state {'refused' if refused else 'continued'}"
        outcome.note(f"{victim.name} {number}, {way}", result if fine else f"exit code {code}: {shown[-500:]}", fine)
    commands.close()
    outcome.figures[f"a run of {victim.name}"] = f"{seconds:.1f} s"


def _tuning(folder: Path) -> Victim:
    """A training of one layer over six steps, each of which is saved."""
    data, target, state = folder / "data.jsonl", folder / "tuned", folder / "tuned.training"
    lines = [{"prompt": f"Say {number}.", "response": f"Yes, {number * number}."} for number in range(6)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = "--batch-size 2 --max-steps 6 --epochs 9 --anchors 2 --cutoff 48 --save-every 1 --log-every 1"

    def measured() -> list[str]:
        steps = [int(path.name[5:]) for path in state.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return (state / "metrics.jsonl").read_text("utf-8").splitlines()[: max(steps)] if steps else []

    def continued(stored: list[str], shown: str) -> bool:
        return (target / "metrics.jsonl").read_text("utf-8").splitlines()[: len(stored)] == stored

    arguments = ["tune", str(smallest_checkpoint(folder / "llama")), str(target), str(data), *options.split()]
    return Victim(arguments, target, state, ["--resume"], measured, continued)


def _distillation(bundle: Path, folder: Path) -> Victim:
    """The answers to some prompts."""
    prompts, target, state = (folder / name for name in ("prompts.jsonl", "answers.jsonl", "answers.jsonl.partial"))
    lines = [{"prompt": f"import json\nimport os\nanswer = {number}\n"} for number in range(_PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")

    def answered() -> list[str]:
        return state.read_text("utf-8").split("\n")[:-1] if state.exists() else []  # a last one may be incomplete

    def continued(stored: list[str], shown: str) -> bool:
        done = re.search(
            rf"(\d+)/{_PROMPTS} prompts are answered", shown
        )  # printed before the first answer of a resumed run
        return (int(done[1]) if done else 0) == len(stored)

    options = "--max-tokens 24 --max-requests 4 --max-seq-len 128 --threads 1"
    return Victim(
        ["distill", str(bundle), str(prompts), str(target), *options.split()], target, state, [], answered, continued
    )


def _timeless(file: Path) -> bytes:
    if file.name == "metrics.jsonl":
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        return json.dumps([{name: line[name] for name in line if name not in _TIMES} for line in lines]).encode()
    return re.sub(rb"\| hours \|.*", b"", file.read_bytes())


def _copy(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
